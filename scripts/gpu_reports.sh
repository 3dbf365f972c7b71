#!/bin/sh
# gpu_reports.sh OUT [STEP...]: the reports of docs/gpu on a machine with two cards, one step after the other.
#
#   MODEL=ORG/NAME scripts/gpu_reports.sh reports                    all steps
#   SECONDS_IN_ALL=1500 scripts/gpu_reports.sh reports plans tune    these, and no step that would begin too late
#
#   host      the machine, doctor, the P2P test, the plan as it would be launched
#   rehearse  the rehearsal of a start, then a first start: what it compiles and how long it takes
#   plans     plans side by side (PLANS, default: ours default marlin replicas no-p2p seed), each with its loads
#   profile   where a step of decoding spends its time, one stream
#   tune      `bwd tune` on the demo model with real text (CANDIDATES: names after --only)
#   demo      the demo model served, and verify
#
# PYTHON is the interpreter that runs bwd (python3), COMMON a file of lines for every .env: ENGINE_PYTHON=, and
# EXTRA_VLLM_ARGS='--load-format dummy' with REASONING_PARSER=none where there are only a config and a tokenizer.
# NVLink multicast stays off in all of it: a machine may share its NVLink with others. Nothing may use the cards
# beside it. A step's output is in OUT/STEP; OUT/steps.log says when each began and how it ended.
set -u
[ $# -ge 1 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
root=$(cd "$(dirname "$0")/.." && pwd)
steps=${*:-host rehearse plans profile tune demo}
python=${PYTHON:-python3}
end=$(($(date +%s) + ${SECONDS_IN_ALL:-7200}))
export BWD_HOME="$root" PYTHONPATH="$root" BWD_STATE_DIR="${BWD_STATE_DIR:-$root/var}"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

say() { echo "$(date +%H:%M:%S) $*" | tee -a "$out/steps.log"; }
# run SECONDS LOG COMMAND...: ended after SECONDS, its output in LOG, its exit code in steps.log
run() {
  seconds=$1 log=$2
  shift 2
  timeout -k 60 "$seconds" "$@" >>"$log" 2>&1
  code=$?
  say "  $code: $(echo "$*" | sed "s|$root/||g; s|$out/||g")"
  return $code
}
bwd() {
  s=$1 l=$2
  shift 2
  run "$s" "$l" "$python" -m bwd "$@"
}
env_of() { # MODEL [line...]: the .env of a step
  echo "MODEL=$1"
  shift
  [ -z "${COMMON:-}" ] || cat "$COMMON"
  printf '%s\n' NVLINK_MULTICAST=off PROFILE=none TENSOR_PARALLEL_SIZE=2 "$@"
}
newest_log() { find "$BWD_STATE_DIR/logs" -name 'engine-*.log' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -1 | cut -d' ' -f2-; }

step_host() {
  bwd 60 "$here/host.txt" host
  bwd 60 "$here/host.json" host --json
  bwd 120 "$here/p2p.txt" doctor p2p
  bwd 60 "$here/doctor.txt" doctor
  bwd 60 "$here/plan.txt" serve --dry-run
}
step_rehearse() {
  bwd 900 "$here/rehearsal.txt" build --rehearse
  bwd 900 "$here/serve.txt" serve
  bwd 60 "$here/status.json" status --json
  bwd 120 "$here/verify.txt" verify
  cp "$(newest_log)" "$here/engine.log"
  bwd 120 "$here/stop.txt" stop
}
step_plans() {
  env_of "$model" >"$here/common.env"
  for plan in ${PLANS:-ours default marlin replicas no-p2p seed}; do
    left=$((end - $(date +%s)))
    if [ "$left" -lt 150 ]; then
      say "  $plan: not begun, $left s are left"
      continue
    fi
    run "$left" "$here/side_by_side.log" "$python" "$root/scripts/gpu_side_by_side.py" --out "$here" \
      --common "$here/common.env" --base default --seed 7 --minutes 6 --variant "$plan"
  done
}
step_profile() {
  traces=$BWD_STATE_DIR/traces
  mkdir -p "$traces"
  flags=$("$python" "$root/scripts/profile_decode.py" --lines "$traces" | sed "s/^EXTRA_VLLM_ARGS=//; s/'//g")
  mine=$(sed -n "s/^EXTRA_VLLM_ARGS=//p" "${COMMON:-/dev/null}" | tr -d "'\"")
  env_of "$model" "EXTRA_VLLM_ARGS='$mine $flags'" >"$here/env"
  bwd 900 "$here/serve.txt" serve &&
    run 120 "$here/profile.txt" "$python" "$root/scripts/profile_decode.py" --out "$here/single" --steps 40
  bwd 120 "$here/stop.txt" stop
}
step_tune() {
  only=
  for name in ${CANDIDATES:-}; do only="$only --only $name"; done
  # shellcheck disable=SC2086
  bwd 7200 "$here/tune.txt" tune --minutes "$(((end - $(date +%s)) / 60))" $only
  cp "$BWD_STATE_DIR"/tune/report.md "$BWD_STATE_DIR"/tune/results*.json "$here/"
}
step_demo() {
  bwd 900 "$here/serve.txt" serve
  bwd 120 "$here/verify.txt" verify
  bwd 120 "$here/stop.txt" stop
}

model=${MODEL:-auto}
unset MODEL
for step in $steps; do
  case $step in host | rehearse | plans | profile | tune | demo) ;; *) echo "no step $step" >&2 && exit 2 ;; esac
done
for step in $steps; do
  if [ "$(date +%s)" -gt $((end - 60)) ]; then
    say "$step: not begun, no time is left"
    continue
  fi
  here=$out/$step
  mkdir -p "$here"
  case $step in tune | demo) env_of demo | sed '/--load-format/d' >"$here/env" ;; *) env_of "$model" >"$here/env" ;; esac
  export BWD_ENV_FILE="$here/env"
  say "$step"
  "step_$step"
done
say "done"
