#!/usr/bin/env bash
# nginx in front of a folder: run_nginx.sh start DATA PORT serves DATA/www read-only; run_nginx.sh stop DATA.
# The binary is Debian's, unpacked into the cache; it runs as whoever calls, in DATA alone.
source "$(dirname "$0")/common.sh"

start() {
    unpack nginx nginx libpcre2-8-0
    mkdir -p "$DATA/www" "$DATA/tmp"
    cat >"$DATA/nginx.conf" <<EOF
daemon off;
$([ "$(id -u)" != 0 ] || echo "user $(id -un) $(id -gn);") # else root's workers become nobody, who may not read DATA
pid $DATA/nginx.pid;
error_log $DATA/log/error.log;
worker_processes 1;
events { worker_connections 512; }
http {
    access_log off;
    client_body_temp_path $DATA/tmp/body;
    proxy_temp_path $DATA/tmp/proxy;
    fastcgi_temp_path $DATA/tmp/fastcgi;
    uwsgi_temp_path $DATA/tmp/uwsgi;
    scgi_temp_path $DATA/tmp/scgi;
    sendfile on;
    server {
        listen 127.0.0.1:$PORT;
        root $DATA/www;
        location / { }
        location ~ /\\. { return 404; } # what a store keeps for itself
        location /guarded/ {
            alias $DATA/www/;
            if (\$http_authorization != "Bearer secret") { return 401; }
        }
        location /indexed/ {
            alias $DATA/www/;
            autoindex on;
        }
        location /zipped/ {
            alias $DATA/www/;
            gzip on;
            gzip_min_length 1;
            gzip_types *;
        }
    }
}
EOF
    local root=$CACHE/nginx/root
    LD_LIBRARY_PATH=$root/usr/lib/$ARCH launch "$DATA/log/nginx.out" \
        "$root/usr/sbin/nginx" -p "$DATA" -c "$DATA/nginx.conf" -e "$DATA/log/error.log"
    wait_for "http://127.0.0.1:$PORT/" 15
}

main "$@"
