{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "infranetes.labels" -}}
app.kubernetes.io/name: infranetes
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "infranetes.selector" -}}
app.kubernetes.io/name: infranetes
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: installer
{{- end }}
{{- define "infranetes.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- define "infranetes.config" -}}
{{ .Values.config }}
{{- if .Values.csi.enabled }}
[csi]
kubelet_dir = "@KUBELET_DIR@"
{{- end }}
{{- if .Values.metrics.enabled }}
[metrics]
listen = "@NODE_IP@:{{ .Values.metrics.port }}"
token_file = "/etc/infranetes/metrics-token"
{{- end }}
{{- end }}
