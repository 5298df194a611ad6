#!/usr/bin/env bash
# Runs a group's ranks on this machine, and starts them again whenever they end:
#
#   deploy/hosts/supervise.sh actor --config my.yaml --node-rank 1 [key.path=value ...]
#
# It ends when the ranks were drained (0), after SIGTERM or SIGINT, and if their input is refused at the first start (2).
# At later starts the same input has worked once, and a port or a folder may come back. See docs/hosts.md.
set -u
PAUSE_S=2
role=$1
shift

stop='' ranks=''
trap 'stop=1; kill -TERM "$ranks" 2>/dev/null' TERM INT

is_first=1
while true; do
  python -m "services.$role" "$@" &
  ranks=$!
  [ -z "$stop" ] || kill -TERM "$ranks" 2>/dev/null # the signal came before the ranks had a pid
  wait "$ranks"
  code=$?
  # A signal ends `wait`, not the ranks: they finish their command.
  while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
    code=$?
  done
  if [ -n "$stop" ] || [ "$code" = 0 ] || { [ "$code" = 2 ] && [ -n "$is_first" ]; }; then
    exit "$code"
  fi
  is_first=
  echo "the $role's ranks on $(uname -n) ended with exit code $code; they start again in $PAUSE_S s" >&2
  sleep "$PAUSE_S"
  [ -z "$stop" ] || exit "$code"
done
