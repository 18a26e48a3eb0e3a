{{/* Base name of objects, at most 40 characters: a longer one is cut and ends in its digest, so that two stay two. */}}
{{- define "pdray.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $long := .Values.fullnameOverride -}}
{{- if not $long -}}
{{- $long = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- if gt (len $long) 40 -}}
{{- printf "%s-%s" ($long | trunc 33 | trimSuffix "-" | trimSuffix ".") ($long | sha256sum | trunc 6) -}}
{{- else -}}
{{- $long | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects this release's pods. KubeRay sets app.kubernetes.io/name itself, so selectors use names of our own. */}}
{{- define "pdray.selector" -}}
pdray/release: {{ include "pdray.fullname" . | quote }}
{{- end -}}

{{- define "pdray.labels" -}}
{{- $ours := dict
  "helm.sh/chart" (printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_"))
  "app.kubernetes.io/name" "pdray"
  "app.kubernetes.io/instance" .Release.Name
  "app.kubernetes.io/version" .Chart.AppVersion
  "app.kubernetes.io/managed-by" .Release.Service
  "pdray/release" (include "pdray.fullname" .) -}}
{{- toYaml (merge $ours .Values.commonLabels) -}}
{{- end -}}

{{/* metadata of an object. (dict "root" $ "name" "suffix or empty" "labels" dict "annotations" dict) */}}
{{- define "pdray.metadata" -}}
{{- $root := .root -}}
name: {{ printf "%s%s" (include "pdray.fullname" $root) (ternary "" (printf "-%s" (default "" .name)) (empty .name)) | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels:
  {{- toYaml (merge (include "pdray.labels" $root | fromYaml) (default dict .labels)) | nindent 2 }}
{{- with merge (dict) (default dict .annotations) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* metadata of a pod template; no versions in it, since a new chart alone need not restart pods. (dict "root" $ "role" "prefill" "labels" dict "annotations" dict) */}}
{{- define "pdray.podMetadata" -}}
{{- $root := .root -}}
{{- $ours := dict "pdray/role" .role "app.kubernetes.io/component" .role -}}
{{- if has .role (list "head" "router" "prefill" "decode" "mixed") }}{{ $_ := set $ours "pdray/ray" "true" }}{{ end -}}
labels:
  {{- toYaml (merge $ours (omit (include "pdray.labels" $root | fromYaml) "helm.sh/chart" "app.kubernetes.io/version") (default dict .labels) $root.Values.podLabels) | nindent 2 }}
{{- with merge (dict) (default dict .annotations) $root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* repository with digest or tag. (dict "image" dict "tag" default) */}}
{{- define "pdray.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .tag .image.tag }}
{{- end -}}
{{- end -}}

{{- define "pdray.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "pdray.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "pdray.secretName" -}}
{{ default (printf "%s-keys" (include "pdray.fullname" .)) .Values.secrets.existingSecret }}
{{- end -}}

{{/* true where calls want an API key. */}}
{{- define "pdray.wantsKeys" -}}
{{- if or .Values.access.existingSecret .Values.access.keys }}true{{ end -}}
{{- end -}}

{{- define "pdray.keysSecret" -}}
{{ default (printf "%s-api-keys" (include "pdray.fullname" .)) .Values.access.existingSecret }}
{{- end -}}

{{/* http or https: what the router's own port speaks. */}}
{{- define "pdray.scheme" -}}
{{ ternary "https" "http" (ne .Values.tls.existingSecret "") }}
{{- end -}}

{{- define "pdray.rayResource" -}}
{{ default (printf "pdray-%s" .role) .spec.rayResource }}
{{- end -}}

{{/* rayservice or plain */}}
{{- define "pdray.mode" -}}
{{- $has := or (.Capabilities.APIVersions.Has "ray.io/v1/RayService") (.Capabilities.APIVersions.Has "ray.io/v1") -}}
{{- if eq .Values.mode "auto" -}}
{{- ternary "rayservice" "plain" $has -}}
{{- else -}}
{{- if and (eq .Values.mode "rayservice") (not $has) -}}
{{- fail "mode: rayservice needs KubeRay, and this cluster has no API ray.io/v1/RayService. Install KubeRay, or set mode: plain; with helm template add --api-versions ray.io/v1/RayService" -}}
{{- end -}}
{{- .Values.mode -}}
{{- end -}}
{{- end -}}

{{/* Marks pods that mount the weights' volume. */}}
{{- define "pdray.weightsLabel" -}}
{{- if eq .Values.weights.source "pvc" }}pdray/volume: weights{{ else }}{}{{ end -}}
{{- end -}}
