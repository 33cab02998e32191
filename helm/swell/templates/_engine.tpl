{{- /* Fails on combinations that cannot run: the values of a group's engines. */}}
{{- define "swell.checkEngine" -}}
{{- $engine := . }}
{{- range list "SWELL_TENSOR_PARALLEL_SIZE" "SWELL_DATA_PARALLEL_SIZE_LOCAL" }}
{{- if and $engine.gpus (hasKey $engine.env .) }}
{{- fail (printf "engine.env.%s: a pod is one engine, and engine.gpus says how many GPUs compute it together" .) }}
{{- end }}
{{- end }}
{{- $stages := include "swell.stages" $engine | int }}{{- $nodes := int $engine.nodes }}
{{- if ne 0 (mod $stages $nodes) }}
{{- fail (printf "engine.env.SWELL_PIPELINE_PARALLEL_SIZE: %d stages cannot be divided among %d nodes (engine.nodes)" $stages $nodes) }}
{{- end }}
{{- $onNode := div $stages $nodes | int }}
{{- if and $engine.gpus (ne 0 (mod (int $engine.gpus) $onNode)) }}
{{- fail (printf "engine.env.SWELL_PIPELINE_PARALLEL_SIZE: %d stages of equally many GPUs need an engine.gpus that %d divides, and it is %d" $onNode $onNode (int $engine.gpus)) }}
{{- end }}
{{- if eq $engine.kind "Deployment" }}
{{- if gt $nodes 1 }}
{{- fail "engine.kind: engines of several nodes (engine.nodes) are a LeaderWorkerSet" }}
{{- end }}
{{- if $engine.modelClaim }}
{{- fail "engine.modelClaim: pods of a Deployment have no claims of their own; use engine.modelVolume, or engine.kind=StatefulSet" }}
{{- end }}
{{- if or (ne $engine.updateStrategy.type "RollingUpdate") $engine.updateStrategy.partition }}
{{- fail "engine.updateStrategy: a Deployment (engine.kind) knows RollingUpdate with maxUnavailable only" }}
{{- end }}
{{- end }}
{{- if gt $nodes 1 }}
{{- range list "SWELL_NNODES" "SWELL_NODE_RANK" "SWELL_MASTER_ADDR" "SWELL_MASTER_PORT" "SWELL_DATA_PARALLEL_SIZE" }}
{{- if hasKey $engine.env . }}
{{- fail (printf "engine.env.%s: engine.nodes says over how many nodes an engine is spread, and the chart how they meet" .) }}
{{- end }}
{{- end }}
{{- if $engine.expertParallel }}
{{- fail "engine.nodes: engines that share experts (engine.expertParallel) are one pod each" }}
{{- end }}
{{- if ne $engine.updateStrategy.type "RollingUpdate" }}
{{- fail "engine.updateStrategy.type: engines of several nodes know RollingUpdate only, where any cluster takes maxUnavailable" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Number of pipeline stages of an engine: the values of a group's engines. */}}
{{- define "swell.stages" -}}
{{- default .nodes .env.SWELL_PIPELINE_PARALLEL_SIZE | int -}}
{{- end }}

{{- /* Rendezvous of an engine's nodes: list ENGINE LEADS, the values of a group's engines and whether the pod is
the leader. The leader uses its own address because its name does not resolve yet. */}}
{{- define "swell.nodesEnv" -}}
{{- $engine := index . 0 }}
- {name: SWELL_DATA_PARALLEL_SIZE, value: "1"}
- {name: SWELL_NNODES, value: {{ $engine.nodes | quote }}}
{{- if not (hasKey $engine.env "SWELL_PIPELINE_PARALLEL_SIZE") }}
- {name: SWELL_PIPELINE_PARALLEL_SIZE, value: {{ include "swell.stages" $engine | quote }}}
{{- end }}
{{- if index . 1 }}
- {name: SWELL_MASTER_ADDR, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- else }}
- {name: SWELL_MASTER_ADDR, value: $(LWS_LEADER_ADDRESS)}
- name: SWELL_NODE_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
{{- end }}
{{- end }}

{{- /* The template of an engine pod: list ROOT GROUP LEADS, with the values of the group's engines in
ROOT. If an engine has several nodes, the leader pod runs the engine and the others run only workers. */}}
{{- define "swell.enginePod" -}}
{{- $root := index . 0 }}{{- $group := index . 1 }}{{- $engine := $root.Values.engine -}}
metadata: {{- include "swell.podMetadata" (list $root "engine" $group) | nindent 2 }}
spec: {{- include "swell.podSpec" (list (include "swell.engineSpec" .) $engine.podSpec) | nindent 2 }}
{{- end }}

{{- define "swell.engineSpec" -}}
{{- $root := index . 0 }}{{- $group := index . 1 }}{{- $leads := index . 2 }}{{- $engine := $root.Values.engine }}
{{- $onNode := div (include "swell.stages" $engine) $engine.nodes | int }}{{- $threads := "" }}
  serviceAccountName: {{ include "swell.serviceAccount" $root }}
  automountServiceAccountToken: false
  # Otherwise a Service named swell would set SWELL_PORT.
  enableServiceLinks: false
  securityContext: {{- include "swell.podSecurity" (list $root "engine") | nindent 4 }}
  # Draining begins with SIGTERM.
  terminationGracePeriodSeconds: {{ add $root.Values.api.preStopSeconds (ternary (max $engine.drainSeconds $root.Values.api.shutdownSeconds) $engine.drainSeconds $root.Values.inferencePool.enabled) 17 }}
  {{- with $engine.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- include "swell.scheduling" (list $root "engine") | nindent 2 }}
  {{- include "swell.initContainers" (list $root "engine" $group) | nindent 2 }}
  containers:
    - name: engine
      image: {{ include "swell.image" (list $root "engine") | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [engine]
      env:
        - {name: SWELL_COORDINATOR, value: "{{ include "swell.fullname" $root }}-coordinator:7550"}
        - {name: SWELL_ADVERTISE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- include "swell.clusterEnv" $root | nindent 8 }}
        {{- include "swell.modelEnv" (list $root $group) | nindent 8 }}
        - {name: SWELL_DRAIN_TIMEOUT, value: {{ $engine.drainSeconds | quote }}}
        {{- if gt (int $engine.nodes) 1 }}
        {{- include "swell.nodesEnv" (list $engine $leads) | nindent 8 }}
        {{- end }}
        {{- if and $leads $engine.ranksFromOrdinals (ne $engine.kind "Deployment") }}
        {{- include "swell.rankEnv" $root | nindent 8 }}
        {{- end }}
        {{- if ne $engine.backend "swell" }}
        - {name: SWELL_ENGINE_BACKEND, value: {{ $engine.backend | quote }}}
        {{- end }}
        {{- if $engine.expertParallel }}
        - {name: SWELL_ENABLE_EXPERT_PARALLEL, value: "true"}
        - {name: SWELL_DATA_PARALLEL_SIZE, value: {{ $group.engineReplicas | quote }}}
        {{- end }}
        {{- if $engine.gpus }}
        - {name: SWELL_DEVICE, value: cuda}
        {{- if gt (int $engine.gpus) $onNode }}
        - {name: SWELL_TENSOR_PARALLEL_SIZE, value: {{ div (int $engine.gpus) $onNode | quote }}}
        {{- end }}
        {{- else }}
        - {name: SWELL_DEVICE, value: cpu}
        {{- /* Without a CPU limit, limits.cpu would be all CPUs of the node, including those of other pods. */}}
        {{- range list "limits" "requests" }}
        {{- if and (not $threads) (hasKey (default dict (index $engine.resources .)) "cpu") }}
        {{- $threads = . }}
        - {name: SWELL_THREADS, valueFrom: {resourceFieldRef: {resource: {{ . }}.cpu}}}
        {{- end }}
        {{- end }}
        {{- end }}
        {{- include "swell.ownEnv" $engine.env | nindent 8 }}
        {{- with $engine.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $engine.envFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $leads }}
      ports:
        - {name: health, containerPort: 8080}
      {{- $ready := dict "httpGet" (dict "path" "/ready" "port" "health") "timeoutSeconds" 5 }}
      {{- $lives := dict "httpGet" (dict "path" "/health" "port" "health") "timeoutSeconds" 5 }}
      {{- $starts := dict "timeoutSeconds" 1 "periodSeconds" 2 "failureThreshold" (max 1 (div $engine.startupSeconds 2)) }}
      startupProbe: {{- include "swell.probe" (list (merge $starts $ready) $engine.probes.startup) | nindent 8 }}
      livenessProbe: {{- include "swell.probe" (list (merge (dict "periodSeconds" 10) $lives) $engine.probes.liveness) | nindent 8 }}
      readinessProbe: {{- include "swell.probe" (list (merge (dict "periodSeconds" 5) $ready) $engine.probes.readiness) | nindent 8 }}
      lifecycle:
        # When a model is removed, its API pods stop first.
        preStop: {exec: {command: [sleep, {{ add $root.Values.api.preStopSeconds 2 | quote }}]}}
      {{- end }}
      securityContext: {{- include "swell.containerSecurity" (list $root "engine") | nindent 8 }}
      {{- $resources := deepCopy $engine.resources }}
      {{- if $engine.gpus }}
      {{- $limits := merge (dict $engine.gpuResource $engine.gpus) (default dict $resources.limits) }}
      {{- $resources = merge (dict "limits" $limits) $resources }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        {{- include "swell.clusterKeyMounts" $root | nindent 8 }}
        {{- include "swell.modelMount" $root | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
        {{- with $engine.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- if and $leads $root.Values.inferencePool.enabled }}
    {{- include "swell.apiContainer" (list $root $group true) | nindent 4 }}
    {{- end }}
    {{- with $engine.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    {{- include "swell.clusterKeyVolume" (list $root "engine") | nindent 4 }}
    {{- if not $engine.modelClaim }}
    {{- include "swell.modelVolume" (list $root "engine") | nindent 4 }}
    {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $engine.shmSize }}}
    {{- if and $leads $root.Values.inferencePool.enabled }}
    {{- include "swell.apiVolumes" $root | nindent 4 }}
    {{- with $root.Values.api.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- end }}
    {{- with $engine.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}
