#!/usr/bin/env bash
# Ceph's S3 server, RGW 16: run_rgw.sh start DATA PORT; run_rgw.sh stop DATA.
# A monitor, one storage daemon that keeps all in memory, and the gateway. Takes PORT to PORT+19. Access key test, secret
# testtest. The programs are Debian 12's, unpacked into the cache (350 MB); starting takes a quarter of a minute.
source "$(dirname "$0")/common.sh"

PACKAGES=(
    radosgw ceph-mon ceph-osd ceph-base ceph-common librados2 librbd1 libcephfs2 librgw2 libradosstriper1
    libboost-{thread,context,iostreams,program-options}1.74.0 libfmt9 libnl-3-200 libnl-route-3-200 libibverbs1
    librdmacm1 libtcmalloc-minimal4 libgoogle-perftools4 liblua5.3-0 liboath0 librabbitmq4 libaio1 libsnappy1v5
    libleveldb1d libdaxctl1 libndctl6 libpmem1 libfuse2 librdkafka1 libbabeltrace1 liblttng-ust1 libunwind8
    python3-ceph-argparse python3-ceph-common python3-rados python3-prettytable python3-wcwidth python3-yaml
)
CLUSTER=11111111-2222-3333-4444-555555555555
STORAGE=22222222-2222-3333-4444-555555555555

configure() {
    MONITORS="v2:127.0.0.1:$((PORT + 1)),v1:127.0.0.1:$((PORT + 2))"
    mkdir -p "$DATA/run" "$DATA/rgw" "$DATA/osd.0"
    cat >"$DATA/ceph.conf" <<EOF
[global]
fsid = $CLUSTER
mon host = [v2:127.0.0.1:$((PORT + 1))/0,v1:127.0.0.1:$((PORT + 2))/0]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind port min = $((PORT + 3))
ms bind port max = $((PORT + 19))
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 4
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 3221225472
run dir = $DATA/run
admin socket = $DATA/run/\$name.asok
log file = $DATA/log/\$name.log
mon data = $DATA/mon.\$id
osd data = $DATA/osd.\$id
osd class dir = $LIB/rados-classes
erasure code dir = $LIB/ceph/erasure-code
plugin dir = $LIB/ceph
mon data avail warn = 1
mon data avail crit = 1
keyring = $DATA/keyring
rgw data = $DATA/rgw
rgw frontends = beast endpoint=127.0.0.1:$PORT
[osd]
keyring = $DATA/osd.\$id/keyring
EOF
    ceph-authtool --create-keyring "$DATA/keyring" --gen-key -n mon. --cap mon 'allow *'
    ceph-authtool "$DATA/keyring" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *'
    ceph-authtool "$DATA/keyring" --gen-key -n client.rgw.a --cap mon 'allow rw' --cap osd 'allow rwx'
    monmaptool --create --fsid "$CLUSTER" --addv a "[$MONITORS]" --clobber "$DATA/monmap"
}

monitor() {
    ceph-mon --mkfs -i a --monmap "$DATA/monmap" -c "$CONF" --keyring "$DATA/keyring"
    launch "$DATA/log/mon.out" ceph-mon -i a -c "$CONF" -f
}

storage() {
    local key
    key=$(ceph-authtool --gen-print-key)
    echo "{\"cephx_secret\": \"$key\"}" |
        timeout 60 /usr/bin/python3 "$ROOT/usr/bin/ceph" -c "$CONF" -n client.admin -k "$DATA/keyring" osd new $STORAGE 0 -i -
    ceph-authtool --create-keyring "$DATA/osd.0/keyring" -n osd.0 --add-key "$key"
    ceph-osd -i 0 -c "$CONF" --mkfs --osd-uuid $STORAGE
    launch "$DATA/log/osd.out" ceph-osd -i 0 -c "$CONF" -f
}

gateway() {
    launch "$DATA/log/rgw.out" radosgw -n client.rgw.a -k "$DATA/keyring" -c "$CONF" -f
    wait_for "http://127.0.0.1:$PORT/" 90
    timeout 60 radosgw-admin -n client.rgw.a -k "$DATA/keyring" -c "$CONF" user create --uid kv --display-name kv \
        --access-key test --secret-key testtest
}

start() {
    unpack rgw "${PACKAGES[@]}"
    ROOT=$CACHE/rgw/root
    LIB=$ROOT/usr/lib/$ARCH
    CONF=$DATA/ceph.conf
    export LD_LIBRARY_PATH=$LIB:$LIB/ceph:$ROOT/lib/$ARCH PATH=$ROOT/usr/bin:$PATH
    export PYTHONPATH=$ROOT/usr/lib/python3/dist-packages
    {
        configure
        monitor
        storage
        gateway
    } >"$DATA/log/setup.log" 2>&1 || fail "the cluster did not come up, see $DATA/log"
}

main "$@"
