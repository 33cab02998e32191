{{- define "swell.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "swell.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "swell.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "swell.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "swell.selector" -}}
app.kubernetes.io/name: {{ include "swell.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "swell.labels" -}}
{{ include "swell.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "swell.serviceAccount" -}}
{{- default (ternary (include "swell.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}

{{- /* Image of a component: list ROOT COMPONENT. */}}
{{- define "swell.image" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}{{ $component.repository }}{{ if $component.digest }}@{{ $component.digest }}{{ else }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}{{ end }}
{{- end }}

{{- /* Secret of a key: list ROOT VALUES-NAME. */}}
{{- define "swell.secret" -}}
{{- $root := index . 0 }}{{- $key := index $root.Values (index . 1) }}
{{- default (include "swell.fullname" $root) $key.existingSecret -}}
{{- end }}

{{- /* Whether there is a key for /metrics: a given one, or one for a ServiceMonitor that needs it. */}}
{{- define "swell.hasMetricsKey" -}}
{{- $apiKeys := or .Values.apiKeys.existingSecret .Values.apiKeys.value }}
{{- $given := or .Values.metricsKey.existingSecret .Values.metricsKey.value }}
{{- if or $given (and $apiKeys .Values.metrics.serviceMonitor.enabled) }}true{{ end }}
{{- end }}

{{- /* Security contexts: list ROOT COMPONENT. A component's own fields win; null takes one out. */}}
{{- define "swell.podSecurity" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- mergeOverwrite (deepCopy $root.Values.podSecurityContext) $component.podSecurityContext | toYaml }}
{{- end }}

{{- define "swell.containerSecurity" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- mergeOverwrite (deepCopy $root.Values.securityContext) $component.securityContext | toYaml }}
{{- end }}

{{- /* How an API pod is asked whether it lives: list ROOT PATH. Where clients need certificates, which
the kubelet has none of, by a connection. */}}
{{- define "swell.apiProbe" -}}
{{- $root := index . 0 }}
{{- if $root.Values.api.env.SWELL_SSL_CA_CERTS -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: http{{ if include "swell.https" $root }}, scheme: HTTPS{{ end }}}
{{- end }}
{{- end }}

{{- define "swell.https" -}}
{{- if or .Values.api.tls.secret .Values.api.env.SWELL_SSL_CERTFILE }}true{{ end }}
{{- end }}

{{- /* Labels and annotations of a component's pods: list ROOT COMPONENT. No versions, so that a new
chart alone starts no pod anew. */}}
{{- define "swell.podMetadata" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) -}}
labels:
  {{- include "swell.selector" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
  {{- with $component.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $component.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Where a component's pods may run: list ROOT COMPONENT. Without wishes they spread over nodes. */}}
{{- define "swell.scheduling" -}}
{{- $root := index . 0 }}{{- $name := index . 1 }}{{- $component := index $root.Values $name }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $component.priorityClassName }}
priorityClassName: {{ $component.priorityClassName }}
{{- else if $component.priorityClass.create }}
priorityClassName: {{ include "swell.priorityClass" . }}
{{- end }}
{{- with $component.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $component.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if $component.topologySpreadConstraints }}
  {{- toYaml $component.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "swell.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $name }}
{{- end }}
{{- end }}

{{- /* Variables that all processes have. */}}
{{- define "swell.clusterEnv" -}}
- {name: SWELL_CLUSTER_KEY_FILE, value: /run/secrets/swell/cluster-key}
- {name: SWELL_LOG_FORMAT, value: json}
- {name: SWELL_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- end }}

{{- define "swell.modelEnv" -}}
{{- with .Values.model.name }}
- {name: SWELL_MODEL, value: {{ . | quote }}}
{{- end }}
{{- with .Values.model.servedName }}
- {name: SWELL_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- with .Values.model.maxLength }}
- {name: SWELL_MAX_MODEL_LEN, value: {{ . | int | quote }}}
{{- end }}
{{- with .Values.model.hubSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.model.hubSecret.key }}}}
{{- end }}
{{- end }}

{{- /* A component's own variables, sorted by name. */}}
{{- define "swell.ownEnv" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{- /* The key's volume and /tmp: list ROOT COMPONENT. */}}
{{- define "swell.clusterKeyVolume" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) -}}
- name: cluster-key
  secret:
    secretName: {{ include "swell.secret" (list $root "clusterKey") }}
    defaultMode: 0440
    items: [{key: {{ $root.Values.clusterKey.key }}, path: cluster-key}]
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: {{ $component.tmpSize }}}
{{- end }}

{{- define "swell.clusterKeyMounts" -}}
- {name: cluster-key, mountPath: /run/secrets/swell, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- /* Where a component has models: list ROOT COMPONENT. */}}
{{- define "swell.modelVolume" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- if and (eq (index . 1) "api") (hasKey $root.Values.model.volume "hostPath") (not $component.modelVolume) }}
{{- fail "api.modelVolume: model.volume is a directory of the engines' nodes; say where API pods, which need the tokenizer only, have it" }}
{{- end -}}
- name: models
  {{- toYaml (default (default (dict "emptyDir" dict) $root.Values.model.volume) $component.modelVolume) | nindent 2 }}
{{- end }}

{{- /* Priority classes are the cluster's, so their names have the namespace: list ROOT COMPONENT. */}}
{{- define "swell.priorityClass" -}}
{{- $root := index . 0 -}}
{{ $root.Release.Namespace }}-{{ include "swell.fullname" $root }}-{{ index . 1 }}
{{- end }}

{{- define "swell.modelMount" -}}
- {name: models, mountPath: /models, readOnly: {{ .Values.model.readOnly }}}
{{- end }}

{{- /* How many replicas a component has now, empty where no cluster is asked: list ROOT COMPONENT KIND. */}}
{{- define "swell.liveReplicas" -}}
{{- $root := index . 0 }}{{- $name := printf "%s-%s" (include "swell.fullname" $root) (index . 1) }}
{{- with lookup "apps/v1" (index . 2) $root.Release.Namespace $name }}{{ .spec.replicas }}{{ end }}
{{- end }}

{{- /* The field replicas: list ROOT COMPONENT KIND. Where an autoscaler owns it, it is what it is now:
taken out of the manifest, it would become 1. */}}
{{- define "swell.replicas" -}}
{{- $component := index (index . 0).Values (index . 1) }}
{{- if not $component.autoscaling.enabled -}}
replicas: {{ $component.replicas }}
{{- else -}}
{{- with include "swell.liveReplicas" . }}replicas: {{ . }}{{ end }}
{{- end }}
{{- end }}

{{- /* Sequences that a pod of engines runs at once. */}}
{{- define "swell.slots" -}}
{{- default 128 .Values.engine.env.SWELL_MAX_NUM_SEQS | int -}}
{{- end }}
