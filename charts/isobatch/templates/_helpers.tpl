{{- define "isobatch.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "isobatch.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "isobatch.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "isobatch.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods: never changed by an upgrade. Takes (list $ component). */}}
{{- define "isobatch.selector" -}}
app.kubernetes.io/name: {{ include "isobatch.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "isobatch.labels" -}}
{{ include "isobatch.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Takes (list $ image). A digest wins over a tag. */}}
{{- define "isobatch.image" -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default (index . 0).Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* A pod without privileges, as the "restricted" pod security standard asks. */}}
{{- define "isobatch.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "isobatch.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Where pods of a component may run. Takes (list $ component's values). */}}
{{- define "isobatch.scheduling" -}}
{{- $own := index . 1 }}
{{- with (index . 0).Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* The variables that tell a process who and where it is. */}}
{{- define "isobatch.identity" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: ISOBATCH_WATCH_NAMESPACES
  value: {{ join "," .Values.watchNamespaces | quote }}
{{- end -}}

{{- define "isobatch.secretName" -}}
{{- .Values.gateway.secret.name | default (printf "%s-gateway" (include "isobatch.fullname" .)) -}}
{{- end -}}

{{/* Where workers run, as a JSON object of one list. */}}
{{- define "isobatch.workerNamespaces" -}}
{{- $watched := .Values.watchNamespaces | default (list .Release.Namespace) -}}
{{- dict "names" (.Values.networkPolicy.workerNamespaces | default $watched) | toJson -}}
{{- end -}}

{{/* Peers of a NetworkPolicy: Prometheus. */}}
{{- define "isobatch.prometheusPeer" -}}
- namespaceSelector: {{- toYaml .Values.networkPolicy.prometheus.namespaceSelector | nindent 4 }}
  podSelector: {{- toYaml .Values.networkPolicy.prometheus.podSelector | nindent 4 }}
{{- end -}}

{{/* A peer of a NetworkPolicy: pods of a component of this release. Takes (list $ component). */}}
{{- define "isobatch.ownPeer" -}}
- namespaceSelector:
    matchLabels: {kubernetes.io/metadata.name: {{ (index . 0).Release.Namespace }}}
  podSelector:
    matchLabels: {{- include "isobatch.selector" . | nindent 6 }}
{{- end -}}
