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

{{- /* Name of a component's pods in an engine group: list ROOT COMPONENT GROUP. */}}
{{- define "swell.workload" -}}
{{- include "swell.fullname" (index . 0) }}-{{ index . 1 }}{{ with (index . 2).name }}-{{ . }}{{ end }}
{{- end }}

{{- /* The engine groups, as YAML: the current model and, during a replacement, the previous one. */}}
{{- define "swell.groups" -}}
{{- $values := .Values }}
groups:
  - name: {{ $values.model.group | quote }}
    current: true
    model: {{- toYaml $values.model | nindent 6 }}
    engineReplicas: {{ $values.engine.replicas }}
    apiReplicas: {{ $values.api.replicas }}
    nodes: {{ $values.engine.nodes }}
    kind: {{ $values.engine.kind }}
    engineEnv: {{- toYaml $values.engine.env | nindent 6 }}
    {{- range $name := list "extraEnv" "envFrom" "expertParallel" "gpus" "backend" }}
    {{ $name }}: {{ toJson (index $values.engine $name) }}
    {{- end }}
    {{- $previous := default dict $values.previous }}
    {{- $minimum := default 1 $values.api.minReadyEngines | int }}
    {{- if and $previous.model (not $values.api.minReadyEngines) }}
    {{- $minimum = div (add1 $values.engine.replicas) 2 }}
    {{- end }}
    minReadyEngines: {{ $minimum }}
{{- with $previous }}
{{- if .model }}
  - name: {{ default "" .model.group | quote }}
    current: false
    {{- $model := omit $values.model "name" "group" "revision" "maxLength" }}
    {{- range $name, $value := .model }}{{ $_ := set $model $name $value }}{{ end }}
    model: {{- toYaml $model | nindent 6 }}
    engineReplicas: {{ if kindIs "invalid" .engineReplicas }}{{ $values.engine.replicas }}{{ else }}{{ .engineReplicas }}{{ end }}
    apiReplicas: {{ if kindIs "invalid" .apiReplicas }}{{ $values.api.replicas }}{{ else }}{{ .apiReplicas }}{{ end }}
    {{- $env := $values.engine.env }}
    {{- with .engine }}{{ if hasKey . "env" }}{{ $env = default dict .env }}{{ end }}{{ end }}
    nodes: {{ default $values.engine.nodes (default dict .engine).nodes }}
    kind: {{ default $values.engine.kind (default dict .engine).kind }}
    engineEnv: {{- toYaml (merge (deepCopy (default dict .engineEnv)) $env) | nindent 6 }}
    {{- $engine := merge (deepCopy (default dict .engine)) $values.engine }}
    {{- range $name := list "extraEnv" "envFrom" "expertParallel" "gpus" "backend" }}
    {{ $name }}: {{ toJson (index $engine $name) }}
    {{- end }}
    minReadyEngines: 1
{{- end }}
{{- end }}
{{- end }}

{{- /* The Kubernetes kind of a group's engines: the group. */}}
{{- define "swell.engineKind" -}}
{{- ternary "LeaderWorkerSet" (default "StatefulSet" .kind) (gt (int .nodes) 1) -}}
{{- end }}

{{- /* The expected number of engines per group, except a group with an autoscaler. */}}
{{- define "swell.expected" -}}
{{- $expected := list }}
{{- range $group := (include "swell.groups" . | fromYaml).groups }}
{{- if not (and $group.current $.Values.engine.autoscaling.enabled) }}
{{- $name := ternary (printf "%s=" $group.name) "" (ne $group.name "") }}
{{- $expected = append $expected (printf "%s%d" $name (int $group.engineReplicas)) }}
{{- end }}
{{- end }}
{{- join "," $expected }}
{{- end }}

{{- /* Settings that must be equal on all engines of a group: list ROOT GROUP. They can come from env, extraEnv
or envFrom, whose ConfigMaps and Secrets are looked up in the cluster. */}}
{{- define "swell.agreed" -}}
{{- $root := index . 0 }}{{- $group := index . 1 }}
{{- $model := $group.model }}
{{- $agreed := list (default "bundled" $model.name) }}
{{- with $model.revision }}{{ $agreed = append $agreed . }}{{ end }}
{{- with $model.maxLength }}{{ $agreed = append $agreed (printf "max length %d" (int .)) }}{{ end }}
{{- if ne $group.backend "swell" }}{{ $agreed = append $agreed (printf "engine backend %s" $group.backend) }}{{ end }}
{{- $given := dict }}
{{- range $source := $group.envFrom }}
{{- range $field, $kind := dict "configMapRef" "ConfigMap" "secretRef" "Secret" }}
{{- with index $source $field }}
{{- $found := default dict (lookup "v1" $kind $root.Release.Namespace .name) }}
{{- range $name, $value := default dict $found.data }}
{{- $_ := set $given (printf "%s%s" (default "" $source.prefix) $name) (ternary (sha256sum $value | trunc 12) $value (eq $kind "Secret")) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := $group.engineEnv }}{{ $_ := set $given $name (include "swell.text" $value) }}{{ end }}
{{- range $group.extraEnv }}
{{- $_ := set $given .name (ternary (include "swell.text" (default "" .value)) (toJson .valueFrom) (empty .valueFrom)) }}
{{- end }}
{{- $known := $root.Files.Get "files/agreed-settings.yaml" | fromYaml }}
{{- $lockstep := or $group.expertParallel (eq (lower (default "" $given.SWELL_ENABLE_EXPERT_PARALLEL)) "true") }}
{{- range $name := concat $known.always (ternary $known.lockstep list $lockstep) }}
{{- with index $given (printf "SWELL_%s" (upper $name)) }}{{ $agreed = append $agreed (printf "%s %s" $name .) }}{{ end }}
{{- end }}
{{- if $group.expertParallel }}{{ $agreed = append $agreed (printf "expert parallel on %d GPUs" (int $group.gpus)) }}{{ end }}
{{- join ", " $agreed }}
{{- end }}

{{- /* Fails an upgrade that disables an autoscaler and thereby removes replicas: list ROOT COMPONENT KIND GROUP. */}}
{{- define "swell.keepsReplicas" -}}
{{- $name := index . 1 }}
{{- $live := int (include "swell.liveReplicas" .) }}
{{- if gt $live (int (index (index . 0).Values $name).replicas) }}
{{- fail (printf "%s.replicas: %d run, as the autoscaler chose that is switched off here: keep them with --set %s.replicas=%d, and take fewer afterwards" $name $live $name $live) }}
{{- end }}
{{- end }}

{{- /* The protocol version of the images (docs/deploy-reference.md). */}}
{{- define "swell.protocol" -}}
{{- default (index .Chart.Annotations "swell/protocol") .Values.image.protocol | int }}
{{- end }}

{{- /* Fails an upgrade to a protocol that is incompatible with the running processes. */}}
{{- define "swell.protocolGuard" -}}
{{- with lookup "apps/v1" "Deployment" .Release.Namespace (printf "%s-coordinator" (include "swell.fullname" .)) }}
{{- /* Versions before this annotation speak protocol 3. */}}
{{- $live := int (default "3" (index (default dict .metadata.annotations) "swell/protocol")) }}
{{- $wanted := int (include "swell.protocol" $) }}
{{- $apart := sub (max $live $wanted) (min $live $wanted) }}
{{- if and (gt (int $apart) 1) (gt (int (default 0 (default dict .status).readyReplicas)) 0) (not $.Values.allowPause) }}
{{- fail (printf "image.tag: this version speaks protocol %d and the running coordinator protocol %d, which do not understand each other. Upgrade to a version that speaks protocol %d first (docs/deploy-reference.md), or end all requests with --set allowPause=true" $wanted $live (add (min $live $wanted) 1)) }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Fails an upgrade that would remove engines of a model before those of another are ready. Looks them up in
the cluster, so it has no effect in `helm template`. */}}
{{- define "swell.guard" -}}
{{- include "swell.protocolGuard" . }}
{{- $current := dict "name" .Values.model.group "current" true "nodes" .Values.engine.nodes "kind" .Values.engine.kind }}
{{- $kinds := dict "StatefulSet" "apps/v1" "Deployment" "apps/v1" }}
{{- if .Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1" }}{{ $_ := set $kinds "LeaderWorkerSet" "leaderworkerset.x-k8s.io/v1" }}{{ end }}
{{- if and (not .Values.engine.autoscaling.enabled) (.Capabilities.APIVersions.Has "keda.sh/v1alpha1") }}
{{- if lookup "keda.sh/v1alpha1" "ScaledObject" .Release.Namespace (include "swell.workload" (list . "engine" $current)) }}
{{- include "swell.keepsReplicas" (list . "engine" (include "swell.engineKind" $current) $current) }}
{{- end }}
{{- end }}
{{- if not .Values.api.autoscaling.enabled }}
{{- if lookup "autoscaling/v2" "HorizontalPodAutoscaler" .Release.Namespace (include "swell.workload" (list . "api" $current)) }}
{{- include "swell.keepsReplicas" (list . "api" "Deployment" $current) }}
{{- end }}
{{- end }}
{{- $names := list }}
{{- range $group := (include "swell.groups" . | fromYaml).groups }}
{{- if has $group.name $names }}
{{- fail "previous.model.group: the same as model.group: two models need names of two groups" }}
{{- end }}
{{- $names = append $names $group.name }}
{{- $workload := include "swell.workload" (list $ "engine" $group) }}
{{- range $kind, $version := $kinds }}
{{- with lookup $version $kind $.Release.Namespace $workload }}
{{- /* Skip StatefulSets created by a LeaderWorkerSet, which have its name. */}}
{{- if not .metadata.ownerReferences }}
{{- if ne $kind (include "swell.engineKind" $group) }}
{{- fail (printf "engine.nodes, engine.kind: %s is a %s, whose name cannot become another kind's. Give the %s a group of its own: --set model.group=NAME,previous.model.group=%s,previous.model.name=... (docs/deploy-reference.md)" $workload $kind (include "swell.engineKind" $group) $group.name) }}
{{- end }}
{{- $live := default "" (index (default dict .metadata.annotations) "swell/agreed") }}
{{- $wanted := include "swell.agreed" (list $ $group) }}
{{- if and $live (ne $live $wanted) (gt (int (default 0 (default dict .status).readyReplicas)) 0) (not $.Values.allowPause) }}
{{- fail (printf "model: the engines of %s serve %q, and engines of %q cannot join them. Give the new model a group of its own beside theirs: --set model.group=NAME,previous.model.group=%s,previous.model.name=... (docs/deploy-reference.md), or end them first with --set allowPause=true" $workload $live $wanted $group.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if not .Values.allowPause }}
{{- $current := include "swell.workload" (list . "api" (dict "name" .Values.model.group)) }}
{{- $able := false }}
{{- with lookup "apps/v1" "Deployment" .Release.Namespace $current }}
{{- $able = gt (int (default 0 (default dict .status).availableReplicas)) 0 }}
{{- end }}
{{- range $kind, $version := $kinds }}
{{- range (default (dict "items" list) (lookup $version $kind $.Release.Namespace "")).items }}
{{- $labels := default dict .metadata.labels }}
{{- if and (eq (default "" (index $labels "app.kubernetes.io/instance")) $.Release.Name) (eq (default "" (index $labels "app.kubernetes.io/component")) "engine") (hasKey $labels "engine_group") }}
{{- if and (not (has $labels.engine_group $names)) (gt (int (default 0 (default dict .status).readyReplicas)) 0) (not $able) }}
{{- fail (printf "previous.model: %s serves, and no API pod of %s is ready: keep it with --set previous.model.group=%s,previous.model.name=... until then, or set allowPause=true" .metadata.name $current $labels.engine_group) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
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
{{- $built := ternary "swell-engine-cuda" "swell-engine" (gt (int $component.gpus) 0) }}
{{- $repository := default (ternary "swell-engine-vllm" $built (eq (default "" $component.backend) "vllm")) $component.repository }}
{{- with $root.Values.image.registry }}{{ . }}/{{ end }}{{ $repository }}{{ if $component.digest }}@{{ $component.digest }}{{ else }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}{{ end }}
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

{{- /* Security contexts: list ROOT COMPONENT. A component's fields take precedence; null removes one. */}}
{{- define "swell.podSecurity" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- mergeOverwrite (deepCopy $root.Values.podSecurityContext) $component.podSecurityContext | toYaml }}
{{- end }}

{{- define "swell.containerSecurity" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- mergeOverwrite (deepCopy $root.Values.securityContext) $component.securityContext | toYaml }}
{{- end }}

{{- /* The probe of an API pod: list ROOT PATH. If client certificates are required, which the kubelet does not
have, it only opens a connection. */}}
{{- define "swell.apiProbe" -}}
{{- $root := index . 0 }}
{{- if $root.Values.api.env.SWELL_SSL_CA_CERTS -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: http{{ if include "swell.https" $root }}, scheme: HTTPS{{ end }}}
{{- end }}
{{- end }}

{{- /* A probe: list DEFAULTS VALUES. The values take precedence. */}}
{{- define "swell.probe" -}}
{{- mergeOverwrite (deepCopy (index . 0)) (default dict (index . 1)) | toYaml }}
{{- end }}

{{- define "swell.https" -}}
{{- if or .Values.api.tls.secret .Values.api.env.SWELL_SSL_CERTFILE }}true{{ end }}
{{- end }}

{{- /* Labels and annotations of a component's pods: list ROOT COMPONENT GROUP, without a group for the
coordinator. No versions, so that a new chart version alone does not restart pods. */}}
{{- define "swell.podMetadata" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) -}}
labels:
  {{- include "swell.selector" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
  {{- if gt (len .) 2 }}
  engine_group: {{ (index . 2).name | quote }}
  {{- end }}
  {{- with $component.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $component.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* A pod spec, as YAML, overridden by the component's fields: list SPEC PODSPEC. */}}
{{- define "swell.podSpec" -}}
{{- mergeOverwrite (index . 0 | fromYaml) (index . 1) | toYaml }}
{{- end }}

{{- /* Scheduling of a component's pods: list ROOT COMPONENT. By default, they spread across nodes, counting
all engine groups together. */}}
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
    {{- if eq $name "api" }}
    # Ignore pods of the version being replaced; otherwise all new ones can end up on one node.
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- end }}

{{- /* Environment variables of all processes. */}}
{{- define "swell.clusterEnv" -}}
- {name: SWELL_CLUSTER_KEY_FILE, value: /run/secrets/swell/cluster-key}
- {name: SWELL_ACCEPTED_CLUSTER_KEY_FILE, value: /run/secrets/swell/accepted-cluster-key}
- {name: SWELL_LOG_FORMAT, value: json}
- {name: SWELL_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
{{- end }}

{{- /* The model of a group: list ROOT GROUP. */}}
{{- define "swell.modelEnv" -}}
{{- $group := index . 1 }}
{{- with $group.name }}
- {name: SWELL_ENGINE_GROUP, value: {{ . | quote }}}
{{- end }}
{{- with $group.model }}
{{- with .name }}
- {name: SWELL_MODEL, value: {{ . | quote }}}
{{- end }}
{{- with .revision }}
- {name: SWELL_REVISION, value: {{ . | quote }}}
{{- end }}
{{- with .servedName }}
- {name: SWELL_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
{{- with .maxLength }}
- {name: SWELL_MAX_MODEL_LEN, value: {{ . | int | quote }}}
{{- end }}
{{- include "swell.hubEnv" . }}
{{- if .offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- end }}
{{- end }}

{{- /* The token for the hub: a model's values. */}}
{{- define "swell.hubEnv" -}}
{{- if .hubSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .hubSecret.name }}, key: {{ .hubSecret.key }}}}
{{- end }}
{{- end }}

{{- /* The text of a variable's value. Numbers in values files are floats; large ones would become 1e+10. */}}
{{- define "swell.text" -}}
{{- if and (kindIs "float64" .) (eq (toString .) (toString (floor .))) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* A component's environment variables, sorted by name. */}}
{{- define "swell.ownEnv" -}}
{{- range $name, $value := . }}
- {name: {{ $name }}, value: {{ include "swell.text" $value | quote }}}
{{- end }}
{{- end }}

{{- /* The volumes of the cluster key and /tmp: list ROOT COMPONENT. */}}
{{- define "swell.clusterKeyVolume" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) -}}
- name: cluster-key
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "swell.secret" (list $root "clusterKey") }}
          items: [{key: {{ $root.Values.clusterKey.key }}, path: cluster-key}]
      # Exists only during key rotation.
      - secret:
          name: {{ include "swell.secret" (list $root "clusterKey") }}
          optional: true
          items: [{key: {{ $root.Values.clusterKey.acceptedKey }}, path: accepted-cluster-key}]
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: {{ $component.tmpSize }}}
{{- end }}

{{- define "swell.clusterKeyMounts" -}}
- {name: cluster-key, mountPath: /run/secrets/swell, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- /* The volume shared by all pods, if any: model.volume, or the claim that the chart creates. */}}
{{- define "swell.sharedVolume" -}}
{{- if .Values.model.claim -}}
persistentVolumeClaim: {claimName: {{ include "swell.fullname" . }}-models}
{{- else }}{{ with .Values.model.volume }}{{ toYaml . }}{{ end }}
{{- end }}
{{- end }}

{{- /* The file that marks a group's model as downloaded by the Job of model.prefetch: list ROOT GROUP. */}}
{{- define "swell.fetchedMark" -}}
{{- $model := (index . 1).model -}}
/models/.fetched-{{ list $model.name $model.revision | toJson | sha256sum | trunc 16 }}
{{- end }}

{{- /* Init containers of a component: list ROOT COMPONENT GROUP. With model.prefetch, pods wait for the
download of their model. */}}
{{- define "swell.initContainers" -}}
{{- $root := index . 0 }}{{- $name := index . 1 }}{{- $component := index $root.Values $name }}
{{- $waits := and $root.Values.model.prefetch.enabled (index . 2).model.name (not $component.modelVolume) (not $component.modelClaim) }}
{{- if or $waits $component.initContainers }}
initContainers:
  {{- if $waits }}
  - name: wait-for-model
    image: {{ include "swell.image" (list $root $name) | quote }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [sh, -c]
    args:
      - |
        until [ -e {{ include "swell.fetchedMark" (list $root (index . 2)) }} ]; do
          echo "waiting for the model, whose progress is in the log of the Job {{ include "swell.fullname" $root }}-fetch-..."
          sleep 5
        done
    securityContext: {{- include "swell.containerSecurity" (list $root $name) | nindent 6 }}
    resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {cpu: 100m, memory: 64Mi}}
    volumeMounts: [{name: models, mountPath: /models, readOnly: true}]
  {{- end }}
  {{- with $component.initContainers }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}

{{- /* The model volume of a component: list ROOT COMPONENT. */}}
{{- define "swell.modelVolume" -}}
{{- $root := index . 0 }}{{- $component := index $root.Values (index . 1) }}
{{- if and (eq (index . 1) "api") (hasKey $root.Values.model.volume "hostPath") (not $component.modelVolume) }}
{{- fail "api.modelVolume: model.volume is a directory of the engines' nodes; say where API pods, which need the tokenizer only, have it" }}
{{- end -}}
{{- $volume := default (default (dict "emptyDir" dict) (include "swell.sharedVolume" $root | fromYaml)) $component.modelVolume -}}
- name: models
  {{- toYaml $volume | nindent 2 }}
{{- end }}

{{- /* Priority classes are cluster-wide, so their names contain the namespace: list ROOT COMPONENT. */}}
{{- define "swell.priorityClass" -}}
{{- $root := index . 0 -}}
{{ $root.Release.Namespace }}-{{ include "swell.fullname" $root }}-{{ index . 1 }}
{{- end }}

{{- define "swell.modelMount" -}}
- {name: models, mountPath: /models, readOnly: {{ .Values.model.readOnly }}}
{{- end }}

{{- /* The current number of replicas of a group's component, empty without a cluster: list ROOT COMPONENT
KIND GROUP. */}}
{{- define "swell.liveReplicas" -}}
{{- $root := index . 0 }}{{- $kind := index . 2 }}{{- $name := include "swell.workload" (list $root (index . 1) (index . 3)) }}
{{- $version := ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (eq $kind "LeaderWorkerSet") }}
{{- if or (eq $version "apps/v1") ($root.Capabilities.APIVersions.Has $version) }}
{{- with lookup $version $kind $root.Release.Namespace $name }}{{ .spec.replicas }}{{ end }}
{{- end }}
{{- end }}

{{- /* The field replicas: list ROOT COMPONENT KIND GROUP. If an autoscaler owns it, keep the current value;
removed from the manifest, it would be reset to 1. */}}
{{- define "swell.replicas" -}}
{{- $name := index . 1 }}{{- $group := index . 3 }}
{{- if not (and $group.current (index (index . 0).Values $name).autoscaling.enabled) -}}
replicas: {{ index $group (printf "%sReplicas" $name) }}
{{- else -}}
{{- with include "swell.liveReplicas" . }}replicas: {{ . }}{{ end }}
{{- end }}
{{- end }}

{{- /* Maximum concurrent sequences per engine pod. */}}
{{- define "swell.slots" -}}
{{- default 128 .Values.engine.env.SWELL_MAX_NUM_SEQS | int -}}
{{- end }}
