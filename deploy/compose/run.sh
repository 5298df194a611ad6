#!/usr/bin/env bash
# Builds what has changed, starts deploy/compose, shows the output of the controller, and removes the containers when the
# controller has ended; the volumes stay. The exit code is the controller's (docs/running.md), or 1 if it never started.
# Ctrl-C saves and leaves. Settings: .env; COMPOSE_FILE=compose.yaml:compose.gpu.yaml for GPUs.
set -uo pipefail
cd "$(dirname "$0")"
REVISION=${REVISION:-$(git describe --always --dirty 2>/dev/null || echo unknown)}
export REVISION
trap ':' INT TERM # the running command ends, and the containers are taken down below

code=
if docker compose up --detach --build; then
  docker compose logs --follow --no-log-prefix controller &
  code=$(docker wait "$(docker compose ps --all --quiet controller)") || code=130
  wait $!
else
  docker compose logs --tail 3
fi
docker compose down
exit "${code:-1}"
