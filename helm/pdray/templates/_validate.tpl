{{/* Refuses what a schema cannot see; each message names the value to change. */}}
{{- define "pdray.validate" -}}
{{- $roles := .Values.roles -}}
{{- if and (eq (int $roles.mixed.replicas) 0) (or (eq (int $roles.prefill.replicas) 0) (eq (int $roles.decode.replicas) 0)) -}}
{{- fail "roles: give both prefill and decode at least one replica, or mixed; this serves nothing" -}}
{{- end -}}
{{- $pvc := .Values.weights.pvc -}}
{{- if eq .Values.weights.source "pvc" -}}
{{- if not (or (eq .Values.model.path $pvc.mountPath) (hasPrefix (printf "%s/" $pvc.mountPath) .Values.model.path)) -}}
{{- fail (printf "model.path must lie under weights.pvc.mountPath (%s) where weights.source is pvc, got %s" $pvc.mountPath .Values.model.path) -}}
{{- end -}}
{{- if eq $pvc.accessMode "ReadWriteOnce" -}}
{{- range $name, $role := $roles -}}
{{- if gt (int $role.replicas) 1 -}}
{{- fail (printf "weights.pvc.accessMode ReadWriteOnce can be mounted on one node only, but roles.%s.replicas is %d: use ReadOnlyMany or ReadWriteMany, or one replica" $name (int $role.replicas)) -}}
{{- end -}}
{{- if eq $role.spread "required" -}}
{{- fail (printf "weights.pvc.accessMode ReadWriteOnce puts all pods on one node, but roles.%s.spread is required" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.weights.source "hub") (not (regexMatch "^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$" .Values.model.path)) -}}
{{- fail (printf "model.path must be a hub id such as owner/name where weights.source is hub, got %s" .Values.model.path) -}}
{{- end -}}
{{- if and (eq .Values.redis.mode "external") (not .Values.redis.external.url) (not .Values.redis.external.existingSecret) -}}
{{- fail "redis.mode external needs redis.external.url or redis.external.existingSecret" -}}
{{- end -}}
{{- if and .Values.head.faultTolerance.enabled (ne .Values.redis.mode "valkey") (not .Values.head.faultTolerance.redisAddress) -}}
{{- fail "head.faultTolerance needs head.faultTolerance.redisAddress where redis.mode is not valkey" -}}
{{- end -}}
{{- $names := list -}}
{{- range $name, $role := $roles -}}
{{- $names = append $names (include "pdray.rayResource" (dict "role" $name "spec" $role)) -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail "roles: two roles have the same rayResource, so their replicas would share pods" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute needs httpRoute.parentRefs" -}}
{{- end -}}
{{- if and .Values.access.keys .Values.access.existingSecret -}}
{{- fail "access: give existingSecret or keys, not both" -}}
{{- end -}}
{{- if and (include "pdray.wantsKeys" .) .Values.monitoring.serviceMonitor.enabled (not .Values.monitoring.serviceMonitor.apiKey.existingSecret) -}}
{{- fail "monitoring.serviceMonitor needs monitoring.serviceMonitor.apiKey.existingSecret, a key of scope metrics, where access asks for keys" -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.clientCaKey (not (and $tls.existingSecret $tls.clientSecret)) -}}
{{- fail "tls.clientCaKey needs tls.existingSecret, and tls.clientSecret for probes" -}}
{{- end -}}
{{- if eq .Values.redis.mode "external" -}}
{{- $redis := .Values.redis.external -}}
{{- if and (or $redis.passwordKey $redis.sentinelPasswordKey) (not $redis.existingSecret) -}}
{{- fail "redis.external.passwordKey and sentinelPasswordKey are keys of redis.external.existingSecret, which is empty" -}}
{{- end -}}
{{- if and $redis.tls.existingSecret $redis.url (not (hasPrefix "rediss://" $redis.url)) -}}
{{- fail "redis.external.tls needs redis.external.url to begin with rediss://" -}}
{{- end -}}
{{- if ne (empty $redis.tls.certKey) (empty $redis.tls.keyKey) -}}
{{- fail "redis.external.tls.certKey and keyKey belong together" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.rdma.enabled (eq .Values.transport "tcp") -}}
{{- fail "rdma needs transport mooncake or auto" -}}
{{- end -}}
{{- end -}}
