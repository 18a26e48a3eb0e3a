{{/* Ray Serve's configuration as YAML: what serveConfigV2 holds, and what the deployer of mode plain sends. */}}
{{- define "pdray.serve" -}}
{{- $args := dict "host" "node" "port" 8000 "grpc_port" 9000 "engine.num_threads" (int .Values.engineThreads) "transport" .Values.transport -}}
{{- $_ := set $args "worker.drain_s" (int .Values.drainSeconds) -}}
{{- $_ := set $args "namespace" (printf "%s.%s" .Release.Namespace (include "pdray.fullname" .)) -}}
{{- $_ := set $args "dtype" .Values.model.dtype -}}
{{- $_ := set $args "model" .Values.model.path -}}
{{- with .Values.model.servedName }}{{ $_ := set $args "model.served_name" . }}{{ end -}}
{{- with int .Values.model.maxModelLen }}{{ $_ := set $args "max_model_len" . }}{{ end -}}
{{- if eq .Values.redis.mode "none" }}{{ $_ := set $args "redis_url" "none" }}{{ end -}}
{{- if .Values.rdma.enabled -}}
{{- $_ := set $args "transfer.protocol" "rdma" -}}
{{- with .Values.rdma.devices }}{{ $_ := set $args "transfer.device" . }}{{ end -}}
{{- end -}}
{{- if include "pdray.wantsKeys" . }}{{ $_ := set $args "access.keys_file" (printf "/etc/pdray-keys/%s" .Values.access.fileKey) }}{{ end -}}
{{- with .Values.tls -}}
{{- if .existingSecret -}}
{{- $_ := set $args "tls.cert_file" "/etc/pdray-tls/tls.crt" -}}
{{- $_ := set $args "tls.key_file" "/etc/pdray-tls/tls.key" -}}
{{- with .clientCaKey }}{{ $_ := set $args "tls.client_ca_file" (printf "/etc/pdray-tls/%s" .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.redis.mode "external" -}}
{{- with .Values.redis.external -}}
{{- if ne .topology "standalone" }}{{ $_ := set $args "redis.topology" .topology }}{{ end -}}
{{- if eq .topology "sentinel" }}{{ $_ := set $args "redis.service" .service }}{{ end -}}
{{- with .username }}{{ $_ := set $args "redis.username" . }}{{ end -}}
{{- with .sentinelUsername }}{{ $_ := set $args "redis.sentinel_username" . }}{{ end -}}
{{- if .tls.existingSecret -}}
{{- range $setting, $key := dict "ca_file" .tls.caKey "cert_file" .tls.certKey "key_file" .tls.keyKey -}}
{{- with $key }}{{ $_ := set $args (printf "redis.%s" $setting) (printf "/etc/pdray-redis/%s" .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $section, $fields := .Values.settings -}}
{{- range $name, $value := $fields -}}
{{- $_ := set $args (printf "%s.%s" $section $name) $value -}}
{{- end -}}
{{- end -}}
{{- $deployments := list -}}
{{- range $name := list "router" "prefill" "decode" "mixed" -}}
{{- $role := index $.Values.roles $name -}}
{{- /* the counts in the arguments only say what exists: a changed argument restarts every replica, a changed num_replicas none */ -}}
{{- if ne $name "router" }}{{ $_ := set $args $name (min 1 (int $role.replicas)) }}{{ end -}}
{{- if gt (int $role.replicas) 0 -}}
{{- $options := dict "num_cpus" (ternary 0.1 0.2 (eq $name "router")) -}}
{{- $_ := set $options "resources" (dict (include "pdray.rayResource" (dict "role" $name "spec" $role)) (ternary 0.5 1.0 (and $role.roomForUpdate (eq (int $role.accelerator.count) 0)))) -}}
{{- if and (gt (int $role.accelerator.count) 0) (eq $role.accelerator.resource "nvidia.com/gpu") -}}
{{- $_ := set $options "num_gpus" (int $role.accelerator.count) -}}
{{- end -}}
{{- $deployment := dict "name" $name "num_replicas" (int $role.replicas) "max_replicas_per_node" 1 "ray_actor_options" $options -}}
{{- if and (eq $name "router") $.Values.live }}{{ $_ := set $deployment "user_config" $.Values.live }}{{ end -}}
{{- $deployments = append $deployments $deployment -}}
{{- end -}}
{{- end -}}
proxy_location: HeadOnly
http_options:
  host: 0.0.0.0
  port: 8001
grpc_options:
  port: 9001
  grpc_servicer_functions:
    - services.protocol.proto.inference_pb2_grpc.add_InferenceServicer_to_server
    - services.protocol.proto.open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
applications:
  - name: pdray
    route_prefix: /
    import_path: services.app:build
    args:
      {{- toYaml $args | nindent 6 }}
    deployments:
      {{- toYaml $deployments | nindent 6 }}
{{- end -}}
