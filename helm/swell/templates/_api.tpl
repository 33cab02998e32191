{{- /* The spec of API pods: list ROOT GROUP. */}}
{{- define "swell.apiSpec" -}}
{{- $root := index . 0 }}{{- $group := index . 1 }}
      serviceAccountName: {{ include "swell.serviceAccount" $root }}
      automountServiceAccountToken: false
      # Otherwise a Service named swell would set SWELL_PORT.
      enableServiceLinks: false
      securityContext: {{- include "swell.podSecurity" (list $root "api") | nindent 8 }}
      terminationGracePeriodSeconds: {{ add $root.Values.api.preStopSeconds $root.Values.api.shutdownSeconds 15 }}
      {{- include "swell.scheduling" (list $root "api") | nindent 6 }}
      {{- include "swell.initContainers" (list $root "api" $group) | nindent 6 }}
      containers:
        {{- include "swell.apiContainer" (list $root $group false) | nindent 8 }}
        {{- with $root.Values.api.sidecars }}{{ toYaml . | nindent 8 }}{{ end }}
      volumes:
        {{- include "swell.clusterKeyVolume" (list $root "api") | nindent 8 }}
        {{- include "swell.modelVolume" (list $root "api") | nindent 8 }}
        {{- include "swell.apiVolumes" $root | nindent 8 }}
        {{- with $root.Values.api.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
{{- end }}

{{- /* The API server container: list ROOT GROUP POOLED. A pooled one runs in an engine pod and serves only
that engine. */}}
{{- define "swell.apiContainer" -}}
{{- $root := index . 0 }}{{- $group := index . 1 }}{{- $pooled := index . 2 -}}
- name: api
  image: {{ include "swell.image" (list $root "api") | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args: [api-server]
  env:
    - {name: SWELL_COORDINATOR, value: "{{ include "swell.fullname" $root }}-coordinator:7550"}
    - {name: SWELL_ADVERTISE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    {{- include "swell.clusterEnv" $root | nindent 4 }}
    {{- include "swell.modelEnv" (list $root $group) | nindent 4 }}
    {{- if $pooled }}
    # Serves only the engine in its pod; endpoint pickers scrape metrics without a key, by vLLM's names.
    - {name: SWELL_DATA_PARALLEL_LB, value: external}
    {{- include "swell.rankEnv" $root | nindent 4 }}
    - {name: SWELL_METRICS_PREFIX, value: "vllm:"}
    - {name: SWELL_OPEN_METRICS, value: "true"}
    {{- else }}
    # In a ConfigMap, so that changing the number does not restart pods.
    - name: SWELL_MIN_READY_ENGINES
      valueFrom:
        configMapKeyRef:
          name: {{ include "swell.fullname" $root }}-api
          key: {{ include "swell.minReadyKey" $group }}
          optional: true
    {{- if and $group.current (include "swell.scalesToZero" $root) }}
    - {name: SWELL_COLD_START_TIMEOUT, value: {{ $root.Values.engine.autoscaling.coldStartSeconds | quote }}}
    {{- end }}
    {{- end }}
    - {name: SWELL_API_SERVER_COUNT, value: {{ ternary 1 $root.Values.api.processes $pooled | quote }}}
    - {name: SWELL_ACCESS_LOG, value: {{ $root.Values.api.accessLog | quote }}}
    - {name: SWELL_SHUTDOWN_TIMEOUT, value: {{ $root.Values.api.shutdownSeconds | quote }}}
    {{- if or $root.Values.apiKeys.existingSecret $root.Values.apiKeys.value }}
    - {name: SWELL_API_KEY_FILE, value: /run/secrets/swell-api/api-keys}
    {{- else if not $root.Values.api.tls.secret }}
    {{- $hosts := concat (list (printf "*.%s" $root.Release.Namespace)) $root.Values.api.allowedHosts }}
    {{- if $root.Values.api.ingress.enabled }}{{ $hosts = concat $hosts (default (list "*") $root.Values.api.ingress.hosts) }}{{ end }}
    {{- /* The gateway in front filters hosts and preserves the Host header. */}}
    {{- if $pooled }}{{ $hosts = list "*" }}{{ end }}
    {{- if $root.Values.api.route.enabled }}{{ $hosts = concat $hosts (default (list "*") $root.Values.api.route.hostnames) }}{{ end }}
    - {name: SWELL_ALLOWED_HOSTS, value: {{ join "," $hosts | quote }}}
    {{- end }}
    {{- if or $root.Values.adminKey.existingSecret $root.Values.adminKey.value }}
    - {name: SWELL_ADMIN_KEY_FILE, value: /run/secrets/swell-api/admin-key}
    {{- end }}
    {{- if include "swell.hasMetricsKey" $root }}
    - {name: SWELL_METRICS_KEY_FILE, value: /run/secrets/swell-api/metrics-key}
    {{- end }}
    {{- if $root.Values.api.tls.secret }}
    - {name: SWELL_SSL_CERTFILE, value: /run/secrets/swell-tls/tls.crt}
    - {name: SWELL_SSL_KEYFILE, value: /run/secrets/swell-tls/tls.key}
    {{- end }}
    {{- if $root.Values.api.modelRoutes }}
    - {name: SWELL_MODEL_ROUTES, value: /etc/swell/model-routes/models.yaml}
    {{- end }}
    {{- with $root.Values.api.responses }}
    {{- if .existingSecret }}
    - name: SWELL_RESPONSE_STORE
      valueFrom: {secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}}
    {{- else }}
    - {name: SWELL_RESPONSE_STORE, value: {{ ternary "/responses/responses.sqlite" "none" (not (empty .size)) }}}
    {{- end }}
    {{- end }}
    {{- include "swell.ownEnv" $root.Values.api.env | nindent 4 }}
    {{- with $root.Values.api.extraEnv }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $root.Values.api.envFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  ports:
    - {name: http, containerPort: 8000}
  {{- $ready := include "swell.apiProbe" (list $root "/ready") | fromYaml }}
  {{- $lives := include "swell.apiProbe" (list $root "/health") | fromYaml }}
  {{- $starts := dict "periodSeconds" 1 "failureThreshold" $root.Values.api.startupSeconds }}
  startupProbe: {{- include "swell.probe" (list (merge $starts $lives) $root.Values.api.probes.startup) | nindent 4 }}
  livenessProbe: {{- include "swell.probe" (list (merge (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6) $lives) $root.Values.api.probes.liveness) | nindent 4 }}
  readinessProbe: {{- include "swell.probe" (list (merge (dict "periodSeconds" 2 "timeoutSeconds" 5) $ready) $root.Values.api.probes.readiness) | nindent 4 }}
  lifecycle:
    # Load balancers stop sending first; then SIGTERM lets running requests finish.
    preStop: {exec: {command: [sleep, {{ $root.Values.api.preStopSeconds | quote }}]}}
  securityContext: {{- include "swell.containerSecurity" (list $root "api") | nindent 4 }}
  resources: {{- toYaml (ternary $root.Values.inferencePool.resources $root.Values.api.resources $pooled) | nindent 4 }}
  volumeMounts:
    {{- include "swell.clusterKeyMounts" $root | nindent 4 }}
    {{- include "swell.modelMount" $root | nindent 4 }}
    - {name: api-keys, mountPath: /run/secrets/swell-api, readOnly: true}
    {{- if $root.Values.api.tls.secret }}
    - {name: tls, mountPath: /run/secrets/swell-tls, readOnly: true}
    {{- end }}
    {{- if $root.Values.api.modelRoutes }}
    - {name: model-routes, mountPath: /etc/swell/model-routes, readOnly: true}
    {{- end }}
    {{- if include "swell.keepsResponses" $root }}
    - {name: responses, mountPath: /responses}
    {{- end }}
    {{- with $root.Values.api.extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}

{{- /* Volumes of API servers, except the cluster key and models. */}}
{{- define "swell.apiVolumes" -}}
{{- $root := . -}}
{{- with $root.Values.api.tls.secret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if include "swell.keepsResponses" $root }}
- name: responses
  emptyDir: {sizeLimit: {{ $root.Values.api.responses.size }}}
{{- end }}
{{- if $root.Values.api.modelRoutes }}
- name: model-routes
  configMap: {name: {{ include "swell.fullname" $root }}-model-routes}
{{- end }}
- name: api-keys
  projected:
    defaultMode: 0440
    sources:
      {{- $none := true }}
      {{- range $name, $path := dict "apiKeys" "api-keys" "adminKey" "admin-key" "metricsKey" "metrics-key" }}
      {{- $key := index $root.Values $name }}
      {{- $generated := and (eq $name "metricsKey") (include "swell.hasMetricsKey" $root) }}
      {{- if or $key.existingSecret $key.value $generated }}
      {{- $none = false }}
      - secret:
          name: {{ include "swell.secret" (list $root $name) }}
          items: [{key: {{ $key.key }}, path: {{ $path }}}]
      {{- end }}
      {{- end }}
      {{- if $none }} []{{ end }}
{{- end }}

{{- /* The rank of a pod's engine: the ordinal of the pod, or of its group of pods. */}}
{{- define "swell.rankEnv" -}}
{{- $label := ternary "leaderworkerset.sigs.k8s.io/group-index" "apps.kubernetes.io/pod-index" (gt (int .Values.engine.nodes) 1) -}}
- name: SWELL_DATA_PARALLEL_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ $label }}']"}}
{{- end }}

{{- /* The key of a group's minimum number of engines in the API pods' ConfigMap. */}}
{{- define "swell.minReadyKey" -}}
min-ready-engines{{ with .name }}-{{ . }}{{ end }}
{{- end }}

{{- /* Whether the autoscaler can remove the last engine; API pods then hold requests until one starts. */}}
{{- define "swell.scalesToZero" -}}
{{- with .Values.engine.autoscaling }}{{ if and .enabled (eq (int .minReplicas) 0) }}yes{{ end }}{{ end }}
{{- end }}

{{- /* Whether each API pod stores responses in its own volume. */}}
{{- define "swell.keepsResponses" -}}
{{- if and .Values.api.responses.size (not .Values.api.responses.existingSecret) }}yes{{ end }}
{{- end }}
