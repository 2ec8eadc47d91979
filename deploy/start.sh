#!/bin/sh
# Starts `kvprune serve` with settings from the environment; further arguments go to it as they are.
# The server replaces this shell, so that SIGTERM reaches it and it lets running requests finish.
set -eu

fail() {
    echo "start.sh: $1" >&2
    exit 2
}

[ -n "${KVPRUNE_MODEL:-}" ] || fail "KVPRUNE_MODEL is not set; name a model, such as smollm2-135m"

# keys come in a file, one to a line, so that they are in no layer of an image and on no command line
if [ -n "${KVPRUNE_API_KEY_FILE:-}" ]; then
    [ -z "${KVPRUNE_API_KEY:-}" ] || fail "KVPRUNE_API_KEY and KVPRUNE_API_KEY_FILE are both set"
    [ -r "$KVPRUNE_API_KEY_FILE" ] || fail "cannot read $KVPRUNE_API_KEY_FILE; mount the keys there"
    KVPRUNE_API_KEY=$(cat "$KVPRUNE_API_KEY_FILE")
    [ -n "$KVPRUNE_API_KEY" ] || fail "$KVPRUNE_API_KEY_FILE holds no key"
    export KVPRUNE_API_KEY
fi

host=${KVPRUNE_HOST:-127.0.0.1}
case $host in
    127.* | localhost | ::1) ;;
    *)
        [ -n "${KVPRUNE_API_KEY:-}${KVPRUNE_WITHOUT_KEYS:-}" ] || fail \
            "others can reach $host: set KVPRUNE_API_KEY_FILE, or KVPRUNE_WITHOUT_KEYS=1 to let them in"
        ;;
esac

# in front of "$@", so that a further argument wins
[ -z "${KVPRUNE_ADAPTER:-}" ] || set -- --adapter "$KVPRUNE_ADAPTER" "$@"
[ -z "${KVPRUNE_REPLICAS:-}" ] || set -- --replicas "$KVPRUNE_REPLICAS" "$@"
[ -z "${KVPRUNE_KV_BUDGET:-}" ] || set -- --kv-budget "$KVPRUNE_KV_BUDGET" "$@"
[ -z "${KVPRUNE_KV:-}" ] || set -- --kv "$KVPRUNE_KV" "$@"
[ -z "${KVPRUNE_DTYPE:-}" ] || set -- --dtype "$KVPRUNE_DTYPE" "$@"
[ -z "${KVPRUNE_DEVICE:-}" ] || set -- --device "$KVPRUNE_DEVICE" "$@"
[ -z "${KVPRUNE_DRAIN:-}" ] || set -- --drain "$KVPRUNE_DRAIN" "$@"

exec kvprune serve "$KVPRUNE_MODEL" --host "$host" --port "${KVPRUNE_PORT:-8000}" "$@"
