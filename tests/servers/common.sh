# Shared by run_*.sh: programs unpacked into a cache without root, processes that are remembered and stopped.
# shellcheck shell=bash

set -euo pipefail

CACHE=${KVWIRE_SERVERS:-$HOME/.cache/kvwire-servers}
ARCH=$(uname -m)-linux-gnu

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# unpack NAME PACKAGE...: fetch Debian packages once and unpack them below $CACHE/NAME/root. Nothing is installed.
unpack() {
    local name=$1
    shift
    mkdir -p "$CACHE/$name/debs" "$CACHE/$name/root"
    exec 9>"$CACHE/$name/lock"
    flock 9
    if [ ! -e "$CACHE/$name/complete" ]; then
        (cd "$CACHE/$name/debs" && apt-get download "$@" >../download.log 2>&1) ||
            fail "cannot download packages, see $CACHE/$name/download.log; needs Debian 12 and 'apt-get update' before"
        for deb in "$CACHE/$name"/debs/*.deb; do
            dpkg -x "$deb" "$CACHE/$name/root"
        done
        touch "$CACHE/$name/complete"
    fi
    exec 9>&-
}

# born PID: when the process began, in clock ticks since the machine did. Empty: there is none, or it only waits to be reaped.
born() {
    sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'
}

# launch LOG COMMAND...: run in the background, and remember it in $DATA/pids.
launch() {
    local log=$1
    shift
    setsid "$@" >"$log" 2>&1 </dev/null &
    echo "$! $(born $!)" >>"$DATA/pids"
}

# Stop what launch() started in $DATA, the last first; a process that has its number by chance is left alone.
stop_all() {
    [ -e "$DATA/pids" ] || return 0
    local pid birth
    while read -r pid birth; do
        if [ "$(born "$pid")" = "$birth" ]; then
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 100); do
                [ "$(born "$pid")" = "$birth" ] || continue 2
                sleep 0.1
            done
            kill -9 "$pid" 2>/dev/null || true
        fi
    done < <(tac "$DATA/pids")
    rm -f "$DATA/pids"
}

# wait_for URL SECONDS: until a server answers with whatever status.
wait_for() {
    for _ in $(seq $(($2 * 5))); do
        curl -s -o /dev/null --max-time 2 "$1" && return
        sleep 0.2
    done
    fail "nothing answers at $1 after $2 s, see $DATA/log"
}

# main start DATA PORT | stop DATA: the script that sources this gives start(), which finds $DATA and $PORT.
main() {
    case "${1:-}:$#" in
    start:3)
        mkdir -p "$2"
        DATA=$(realpath "$2") PORT=$3
        [ ! -e "$DATA/pids" ] || fail "something runs in $DATA: stop it first"
        rm -rf "$DATA"
        mkdir -p "$DATA/log"
        trap 'status=$?; [ $status = 0 ] || stop_all; exit $status' EXIT
        start
        ;;
    stop:2)
        DATA=$(realpath "$2")
        stop_all
        ;;
    *)
        fail "usage: ${0##*/} start DATA PORT, or stop DATA; DATA is a folder of its own, emptied at every start"
        ;;
    esac
}
