# Functions that run the steps of tests/gpu/run.sh. They read $deadline, in seconds of $SECONDS, and
# $patience, which multiplies limits. They write logs to $work, and set failed=1 if a step fails.

# step NAME LIMIT COMMAND...: runs at most LIMIT seconds; does not start if it might outlast the
# deadline, or if its name does not match the regular expression STEPS.
step() {
  local name=$1 limit=$(($2 * patience)) start=$SECONDS code=0
  shift 2
  [[ $name =~ ${STEPS:-} ]] || return 0
  if [ $((SECONDS + limit)) -gt "$deadline" ]; then
    leave_out "$name" "it may take $limit s, and $((deadline - SECONDS)) s are left"
    return
  fi
  timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1 || code=$?
  tail -n 12 "$work/$name.log"
  printf '=== %s: %s (%d s)\n' "$name" "$([ $code = 0 ] && echo passed || echo "FAILED, code $code")" \
    $((SECONDS - start))
  [ $code = 0 ] || failed=1
}

leave_out() {
  printf '=== %s: left out, %s\n' "$1" "$2"
}
