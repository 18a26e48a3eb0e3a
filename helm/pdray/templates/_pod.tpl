{{- define "pdray.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- if .locksMemory }}
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}

{{/* What every pod of the chart begins with, hooks too. */}}
{{- define "pdray.podBase" -}}
serviceAccountName: {{ include "pdray.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 .Values.podSecurityContext.runAsUser }}
  runAsGroup: {{ int64 .Values.podSecurityContext.runAsGroup }}
  fsGroup: {{ int64 .Values.podSecurityContext.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{/* Placement. (dict "root" $ "role" name "spec" its values) */}}
{{- define "pdray.placement" -}}
{{- $root := .root -}}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- $affinity := deepCopy .spec.affinity -}}
{{- if include "pdray.sharesNode" (dict "root" $root "role" .role) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (dict "pdray/release" (include "pdray.fullname" $root) "pdray/volume" "weights")) -}}
{{- $pod := default dict $affinity.podAffinity -}}
{{- $_ := set $pod "requiredDuringSchedulingIgnoredDuringExecution" (append (default list $pod.requiredDuringSchedulingIgnoredDuringExecution) $term) -}}
{{- $_ := set $affinity "podAffinity" $pod -}}
{{- end -}}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .spec.spread (ne .spec.spread "none") }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq .spec.spread "required") }}
    labelSelector:
      matchLabels:
        {{- include "pdray.selector" $root | nindent 8 }}
        pdray/role: {{ .role }}
{{- end }}
{{- end -}}

{{/* true where pods must share a node, for a ReadWriteOnce volume. (dict "root" $ "role" name) */}}
{{- define "pdray.sharesNode" -}}
{{- $weights := .root.Values.weights -}}
{{- if and (ne .role "head") (eq $weights.source "pvc") (eq $weights.pvc.accessMode "ReadWriteOnce") }}true{{ end -}}
{{- end -}}

{{/* Environment of every Ray container; all of them may run the task that builds the application. */}}
{{- define "pdray.env" -}}
{{- $root := .root -}}
- name: HOME
  value: /var/lib/pdray
- name: PDRAY_HOME
  value: /var/lib/pdray
- name: HF_HOME
  value: /var/lib/pdray/hub
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "600"
- name: PDRAY_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "pdray.secretName" $root | quote }}
      key: secret
{{- if $root.Values.rayAuth.enabled }}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "pdray.secretName" $root | quote }}
      key: auth_token
{{- else }}
- name: RAY_AUTH_MODE
  value: disabled
{{- end }}
{{- if eq $root.Values.redis.mode "valkey" }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "pdray.secretName" $root | quote }}
      key: valkey_password
- name: PDRAY_REDIS__URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "pdray.fullname" $root }}-valkey:6379/0
{{- else if eq $root.Values.redis.mode "external" }}
- name: PDRAY_REDIS__URL
  {{- if not $root.Values.redis.external.url }}
  valueFrom:
    secretKeyRef:
      name: {{ $root.Values.redis.external.existingSecret | quote }}
      key: {{ $root.Values.redis.external.urlKey | quote }}
  {{- else }}
  value: {{ $root.Values.redis.external.url | quote }}
  {{- end }}
{{- range $name, $key := dict "PDRAY_REDIS__PASSWORD" $root.Values.redis.external.passwordKey "PDRAY_REDIS__SENTINEL_PASSWORD" $root.Values.redis.external.sentinelPasswordKey }}
{{- if $key }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ $root.Values.redis.external.existingSecret | quote }}
      key: {{ $key | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq $root.Values.weights.source "hub") $root.Values.weights.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $root.Values.weights.hub.existingSecret | quote }}
      key: {{ $root.Values.weights.hub.tokenKey | quote }}
{{- end }}
{{- with .spec.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources with accelerators and RDMA devices. (dict "root" $ "role" name "spec" values) */}}
{{- define "pdray.resources" -}}
{{- $resources := deepCopy .spec.resources -}}
{{- $limits := default dict $resources.limits -}}
{{- $requests := default dict $resources.requests -}}
{{- $extra := dict -}}
{{- with .spec.accelerator }}{{ if gt (int .count) 0 }}{{ $_ := set $extra .resource (toString (int .count)) }}{{ end }}{{ end -}}
{{- if and .root.Values.rdma.enabled (has .role (list "prefill" "decode" "mixed")) -}}
{{- $_ := set $extra .root.Values.rdma.resource (toString (int .root.Values.rdma.count)) -}}
{{- end -}}
{{- include "pdray.quantities" (dict "requests" (merge (deepCopy $extra) $requests) "limits" (merge (deepCopy $extra) $limits)) }}
{{- end -}}

{{/* requests and limits with every quantity as text: KubeRay's definition takes no fractions. */}}
{{- define "pdray.quantities" -}}
{{- range $part := list "requests" "limits" }}
{{ $part }}:
  {{- range $name, $quantity := index $ $part }}
  {{ $name }}: {{ toString $quantity | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Is the raylet alive? Its agent answers without the token. */}}
{{- define "pdray.raylet" -}}
httpGet:
  path: /api/local_raylet_healthz
  port: 52365
timeoutSeconds: 5
{{- end -}}

{{/* Does this pod's part of pdray serve? (dict "root" $ "role" name) */}}
{{- define "pdray.serves" -}}
{{- if eq .role "head" -}}
httpGet:
  path: /api/gcs_healthz
  port: 8265
timeoutSeconds: 5
{{- else if and (eq .role "router") .root.Values.tls.clientCaKey -}}
exec:
  command: [python, /etc/pdray/ask_ready.py, "https://127.0.0.1:8000/ready", /etc/pdray-tls/tls.crt, /etc/pdray-client]
timeoutSeconds: 5
{{- else if eq .role "router" -}}
httpGet:
  path: /ready
  port: 8000
  scheme: {{ include "pdray.scheme" .root | upper }}
timeoutSeconds: 5
{{- else -}}
exec:
  command:
    - sh
    - -c
    - for f in /var/lib/pdray/run/serving-*; do kill -0 "${f##*-}" 2>/dev/null && exit 0; done; exit 1
timeoutSeconds: 5
{{- end -}}
{{- end -}}

{{/* Spec of a Ray pod. (dict "root" $ "role" name "spec" values "command" list, empty where KubeRay fills it) */}}
{{- define "pdray.rayPod" -}}
{{- $root := .root -}}
{{- $worker := has .role (list "prefill" "decode" "mixed") -}}
{{- include "pdray.podBase" $root }}
{{- include "pdray.placement" . }}
terminationGracePeriodSeconds: {{ add (int $root.Values.drainSeconds) 45 }}
{{- if and .command (ne .role "head") }}
initContainers:
  - name: wait-for-head
    image: {{ include "pdray.image" (dict "image" $root.Values.image "tag" $root.Chart.AppVersion) | quote }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command:
      - bash
      - -c
      - until (exec 3<>/dev/tcp/{{ include "pdray.fullname" $root }}-head/6379) 2>/dev/null; do sleep 1; done
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 64Mi}
    securityContext:
      {{- include "pdray.containerSecurity" (dict) | nindent 6 }}
{{- end }}
containers:
  - name: {{ ternary "ray-head" "ray-worker" (eq .role "head") }}
    image: {{ include "pdray.image" (dict "image" $root.Values.image "tag" $root.Chart.AppVersion) | quote }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- with .command }}
    command:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    env:
      {{- include "pdray.env" . | nindent 6 }}
      {{- if and .command (eq .role "head") $root.Values.head.faultTolerance.enabled }}
      {{- include "pdray.gcsEnv" $root | nindent 6 }}
      {{- end }}
    ports:
      {{- if eq .role "head" }}
      - {name: gcs-server, containerPort: 6379}
      - {name: dashboard, containerPort: 8265}
      - {name: serve, containerPort: 8001}
      {{- end }}
      {{- if eq .role "router" }}
      - {name: http, containerPort: 8000}
      - {name: grpc, containerPort: 9000}
      {{- end }}
      - {name: metrics, containerPort: 8080}
    resources:
      {{- include "pdray.resources" . | nindent 6 }}
    securityContext:
      {{- include "pdray.containerSecurity" (dict "locksMemory" (and $worker $root.Values.rdma.enabled)) | nindent 6 }}
    startupProbe:
      {{- if eq .role "router" }}
      {{- include "pdray.raylet" . | nindent 6 }}
      {{- else }}
      {{- include "pdray.serves" . | nindent 6 }}
      {{- end }}
      periodSeconds: 10
      failureThreshold: {{ mul (int .spec.startupMinutes) 6 }}
    readinessProbe:
      {{- include "pdray.serves" . | nindent 6 }}
      periodSeconds: 5
      failureThreshold: 2
    livenessProbe:
      {{- include "pdray.raylet" . | nindent 6 }}
      periodSeconds: 10
      failureThreshold: 6
    {{- if ne .role "head" }}
    lifecycle:
      preStop:
        exec:
          command: [python, /etc/pdray/drain_node.py, {{ add (int $root.Values.drainSeconds) 20 | quote }}]
    {{- end }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: home, mountPath: /var/lib/pdray}
      - {name: shm, mountPath: /dev/shm}
      - {name: files, mountPath: /etc/pdray, readOnly: true}
      {{- if and (ne .role "head") (eq $root.Values.weights.source "pvc") }}
      - name: weights
        mountPath: {{ $root.Values.weights.pvc.mountPath | quote }}
        readOnly: true
        {{- with $root.Values.weights.pvc.subPath }}
        subPath: {{ . | quote }}
        {{- end }}
      {{- end }}
      {{- range include "pdray.secretMounts" . | fromYamlArray }}
      - {name: {{ .name }}, mountPath: /etc/pdray-{{ .name }}, readOnly: true}
      {{- end }}
  {{- if and .command (eq .role "head") }}
  {{- include "pdray.deployer" $root | nindent 2 }}
  {{- end }}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 8Gi}
  - name: home
    emptyDir: {sizeLimit: {{ $root.Values.cache.size }}}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ .spec.shmSize }}}
  - name: files
    configMap:
      name: {{ include "pdray.fullname" $root }}-files
  {{- if and (ne .role "head") (eq $root.Values.weights.source "pvc") }}
  - name: weights
    persistentVolumeClaim:
      claimName: {{ default (printf "%s-weights" (include "pdray.fullname" $root)) $root.Values.weights.pvc.existingClaim | quote }}
      readOnly: true
  {{- end }}
  {{- range include "pdray.secretMounts" . | fromYamlArray }}
  - name: {{ .name }}
    secret: {secretName: {{ .secret | quote }}, defaultMode: 288}
  {{- end }}
{{- end -}}

{{/* Secrets that a role's pods see as files, under /etc/pdray-<name>; 288 is mode 0440. (dict "root" $ "role" name) */}}
{{- define "pdray.secretMounts" -}}
{{- $values := .root.Values -}}
{{- $found := list -}}
{{- if eq .role "router" -}}
{{- if include "pdray.wantsKeys" .root }}{{ $found = append $found (dict "name" "keys" "secret" (include "pdray.keysSecret" .root)) }}{{ end -}}
{{- with $values.tls.existingSecret }}{{ $found = append $found (dict "name" "tls" "secret" .) }}{{ end -}}
{{- if and $values.tls.existingSecret $values.tls.clientCaKey }}{{ $found = append $found (dict "name" "client" "secret" $values.tls.clientSecret) }}{{ end -}}
{{- end -}}
{{- if and (ne .role "head") (eq $values.redis.mode "external") -}}
{{- with $values.redis.external.tls.existingSecret }}{{ $found = append $found (dict "name" "redis" "secret" .) }}{{ end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* The container that sends the Serve configuration to the head beside it, in mode plain. */}}
{{- define "pdray.deployer" -}}
- name: deployer
  image: {{ include "pdray.image" (dict "image" .Values.image "tag" .Chart.AppVersion) | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, -u, /etc/pdray/keep_deployed.py, /etc/pdray/serve.json, "http://127.0.0.1:8265"]
  {{- if .Values.rayAuth.enabled }}
  env:
    - name: RAY_AUTH_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ include "pdray.secretName" . | quote }}
          key: auth_token
  {{- end }}
  resources:
    {{- include "pdray.quantities" .Values.head.deployerResources | nindent 4 }}
  securityContext:
    {{- include "pdray.containerSecurity" (dict) | nindent 4 }}
  volumeMounts:
    - {name: files, mountPath: /etc/pdray, readOnly: true}
{{- end -}}

{{/* Where Ray keeps the cluster's state, in mode plain. */}}
{{- define "pdray.gcsEnv" -}}
- name: RAY_REDIS_ADDRESS
  value: {{ include "pdray.gcsRedis" . }}
- name: RAY_external_storage_namespace
  value: {{ include "pdray.fullname" . }}
{{- with .Values.head.faultTolerance.username }}
- name: REDIS_USERNAME
  value: {{ . | quote }}
{{- end }}
{{- with include "pdray.gcsPassword" . }}
- name: REDIS_PASSWORD
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pdray.gcsRedis" -}}
{{ default (printf "%s-valkey:6379" (include "pdray.fullname" .)) .Values.head.faultTolerance.redisAddress }}
{{- end -}}

{{- define "pdray.gcsPassword" -}}
{{- $given := .Values.head.faultTolerance -}}
{{- if $given.existingSecret -}}
valueFrom:
  secretKeyRef:
    name: {{ $given.existingSecret | quote }}
    key: {{ $given.passwordKey | quote }}
{{- else if not $given.redisAddress -}}
valueFrom:
  secretKeyRef:
    name: {{ include "pdray.secretName" . | quote }}
    key: valkey_password
{{- end -}}
{{- end -}}
