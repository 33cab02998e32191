#!/bin/sh
# Replaces the engines of a StatefulSet with `updateStrategy.type: OnDelete`, several at a time:
#
#   replace-engines.sh NAMESPACE STATEFULSET AT_A_TIME [SECONDS]
#
# Goes from the highest ordinal down, like the controller, and waits until each batch is ready. If a
# batch takes longer than SECONDS (default 3600), it stops, and the other engines keep serving the old
# version. To continue after that or after an interruption, run it again.
set -eu
if [ $# -lt 3 ] || [ "$3" -lt 1 ]; then
    sed -n '2,4p' "$0" >&2
    exit 2
fi
namespace=$1 name=$2 at_a_time=$3 seconds=${4:-3600}

kube() {
    kubectl --namespace "$namespace" "$@"
}

field() { # KIND NAME JSONPATH
    kube get "$1" "$2" --output "jsonpath={$3}"
}

await() { # PODS...
    # Deleted pods do not exist for a moment, so check the revision as well as readiness.
    deadline=$(($(date +%s) + seconds))
    for pod in "$@"; do
        until [ "$(field pod "$pod" .metadata.labels.controller-revision-hash 2> /dev/null)" = "$new" ] \
            && [ "$(field pod "$pod" '.status.conditions[?(@.type=="Ready")].status' 2> /dev/null)" = True ]; do
            if [ "$(date +%s)" -ge "$deadline" ]; then
                echo "$pod is not ready after $seconds s: stopped, the other engines stay as they are" >&2
                exit 1
            fi
            sleep "${POLL_SECONDS:-2}"
        done
    done
}

new=$(field statefulset "$name" .status.updateRevision)
ordinal=$(($(field statefulset "$name" .spec.replicas) - 1))
batch=""
count=0
replaced=0
while [ "$ordinal" -ge 0 ]; do
    pod="$name-$ordinal"
    if [ "$(field pod "$pod" .metadata.labels.controller-revision-hash)" = "$new" ]; then
        await "$pod" # replaced by an earlier run
    else
        batch="$batch $pod"
        count=$((count + 1))
    fi
    if [ "$count" -eq "$at_a_time" ] || { [ "$ordinal" -eq 0 ] && [ "$count" -gt 0 ]; }; then
        echo "replacing$batch"
        # Each engine drains: its requests finish there or continue on another engine.
        # shellcheck disable=SC2086
        kube delete pod $batch --wait=false
        # shellcheck disable=SC2086
        await $batch
        replaced=$((replaced + count))
        batch=""
        count=0
    fi
    ordinal=$((ordinal - 1))
done
echo "$replaced engines replaced, all of $name are of revision $new"
