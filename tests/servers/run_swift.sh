#!/usr/bin/env bash
# OpenStack Swift with its S3 interface: run_swift.sh start DATA PORT; run_swift.sh stop DATA.
# Takes PORT and the three ports above. Access key kv:test, secret testtest. Swift comes from PyPI, into the cache.
source "$(dirname "$0")/common.sh"

VERSION=2.38.3

install() {
    mkdir -p "$CACHE/swift"
    exec 9>"$CACHE/swift/lock"
    flock 9
    if [ ! -e "$CACHE/swift/complete" ]; then
        rm -rf "$CACHE/swift/venv"
        python3 -m venv "$CACHE/swift/venv"
        "$CACHE/swift/venv/bin/pip" install -q "swift==$VERSION" >"$CACHE/swift/install.log" 2>&1 ||
            fail "cannot install swift, see $CACHE/swift/install.log"
        touch "$CACHE/swift/complete"
    fi
    exec 9>&-
}

# storage NAME PORT: one of the three storage servers, with a ring of one device.
storage() {
    local name=$1 port=$2
    (
        cd "$DATA/etc"
        "$BIN/swift-ring-builder" "$name.builder" create 4 1 1 # 16 partitions, one copy
        "$BIN/swift-ring-builder" "$name.builder" add "r1z1-127.0.0.1:$port/d1" 1
        "$BIN/swift-ring-builder" "$name.builder" rebalance
    ) >"$DATA/log/$name-ring.log" 2>&1
    cat >"$DATA/etc/$name.conf" <<EOF
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $port
devices = $DATA/srv
mount_check = false
user = $(id -un)
swift_dir = $DATA/etc
workers = 0
log_level = WARNING
db_preallocation = off
disable_fallocate = true
fallocate_reserve = 0
[pipeline:main]
pipeline = $name-server
[app:$name-server]
use = egg:swift#$name
recon_lock_path = $DATA/lock
[$name-replicator]
EOF
    launch "$DATA/log/$name.log" "$BIN/swift-$name-server" "$DATA/etc/$name.conf"
}

start() {
    install
    BIN=$CACHE/swift/venv/bin
    mkdir -p "$DATA/etc" "$DATA/srv/d1" "$DATA/lock"
    cat >"$DATA/etc/swift.conf" <<EOF
[swift-hash]
swift_hash_path_suffix = kv
swift_hash_path_prefix = kv
[storage-policy:0]
name = gold
default = yes
EOF
    storage account $((PORT + 1))
    storage container $((PORT + 2))
    storage object $((PORT + 3))
    cat >"$DATA/etc/proxy.conf" <<EOF
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $PORT
user = $(id -un)
workers = 0
swift_dir = $DATA/etc
log_level = WARNING
[pipeline:main]
pipeline = catch_errors cache listing_formats bulk s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:listing_formats]
use = egg:swift#listing_formats
[filter:bulk]
use = egg:swift#bulk
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:slo]
use = egg:swift#slo
[filter:tempauth]
use = egg:swift#tempauth
user_kv_test = testtest .admin
EOF
    launch "$DATA/log/proxy.log" "$BIN/swift-proxy-server" "$DATA/etc/proxy.conf"
    for port in "$PORT" $((PORT + 1)) $((PORT + 2)) $((PORT + 3)); do
        wait_for "http://127.0.0.1:$port/" 30
    done
}

main "$@"
