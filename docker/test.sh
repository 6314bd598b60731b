#!/usr/bin/env bash
# Builds the image, brings the swarm of docker/compose.yaml up, waits until every node has learned from its peers' groups, and
# tears everything down. Where no Docker engine runs, it starts one (root and Debian's docker.io, docker-compose and debootstrap
# are needed for that). Usage: docker/test.sh, or `make docker-test`.
set -euo pipefail
cd "$(dirname "$0")/.."

LIMIT_S=${LIMIT_S:-600}
export COMPOSE_PROJECT_NAME=swarm-node-test
export BASE_IMAGE=${BASE_IMAGE:-}

say() { printf '[docker-test] %s\n' "$*"; }

if ! docker info >/dev/null 2>&1; then
    command -v dockerd >/dev/null || { say "no Docker engine runs and none is installed: apt-get install docker.io iptables docker-compose debootstrap"; exit 2; }
    say "starting a Docker engine"
    dockerd >/tmp/swarm-node-dockerd.log 2>&1 &
    engine=$!
    for _ in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 1; done
    docker info >/dev/null 2>&1 || { say "the engine did not start within 60 s:"; tail -n 5 /tmp/swarm-node-dockerd.log; exit 1; }
fi
compose() { if docker compose version >/dev/null 2>&1; then docker compose -f docker/compose.yaml "$@"; else docker-compose -f docker/compose.yaml "$@"; fi; }

down() {
    status=$?
    [ "$status" -eq 0 ] || compose logs --tail 30 || true
    compose down --volumes --timeout 15 >/dev/null 2>&1 || true
    [ -z "${engine:-}" ] || kill "$engine" 2>/dev/null || true
    exit "$status"
}
trap down EXIT

if [ -z "$BASE_IMAGE" ]; then
    BASE_IMAGE=python:3.11-slim
    if ! docker image inspect "$BASE_IMAGE" >/dev/null 2>&1 && ! docker pull --quiet "$BASE_IMAGE" >/dev/null 2>&1; then
        BASE_IMAGE=swarm-node-base:bookworm
        if ! docker image inspect "$BASE_IMAGE" >/dev/null 2>&1; then
            say "no image can be pulled: making a base image with debootstrap"
            rootfs=$(mktemp -d)
            debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$rootfs" >/dev/null
            tar -C "$rootfs" -c . | docker import - "$BASE_IMAGE" >/dev/null
            rm -rf "$rootfs"
        fi
    fi
fi
say "base image: $BASE_IMAGE"

# The image installs from wheels made here, with this machine's pip configuration: a container has neither its proxies nor its mirrors.
stamp=docker/wheelhouse/.lock
if ! cmp -s requirements.lock "$stamp"; then
    say "filling docker/wheelhouse from requirements.lock"
    rm -f docker/wheelhouse/*.whl
    .venv/bin/pip wheel --quiet --disable-pip-version-check -w docker/wheelhouse -r requirements.lock setuptools
    cp requirements.lock "$stamp"
fi

say "building"
compose build --quiet 2>&1 || compose build
say "starting three nodes"
compose up -d
began=$(date +%s)
while :; do
    waiting=""
    for node in ada ben cyd; do
        used=$(compose exec -T "$node" swarm-node status --home /home/swarm/node --json 2>/dev/null |
            .venv/bin/python -c 'import json, sys; print(json.load(sys.stdin).get("foreign_groups_used", 0))' 2>/dev/null || echo 0)
        [ "$used" -gt 0 ] || waiting="$waiting $node"
        eval "used_$node=$used"
    done
    [ -n "$waiting" ] || break
    elapsed=$(($(date +%s) - began))
    [ "$elapsed" -lt "$LIMIT_S" ] || { say "after ${elapsed} s these nodes had used no foreign group:$waiting"; exit 1; }
    say "${elapsed} s: waiting for$waiting"
    sleep 5
done
for node in ada ben cyd; do
    health=$(docker inspect --format '{{.State.Health.Status}}' "$(compose ps -q "$node")")
    eval "say \"$node: \$used_$node foreign groups used, health: $health\""
done
say "passed: every node learned from its peers' groups ($(($(date +%s) - began)) s after start)"
