#!/usr/bin/env bash
# Chromium without a window: chromium.sh ARGUMENT... runs it, unpacked into the cache from Debian's packages.
source "$(dirname "$0")/common.sh"

NEEDED=(
    chromium-headless-shell chromium-common libasound2 libatk-bridge2.0-0 libatk1.0-0 libatspi2.0-0 libavahi-client3
    libavahi-common3 libcups2 libdbus-1-3 libdouble-conversion3 libdrm2 libfontconfig1 libfreetype6 libgbm1 libglib2.0-0
    libharfbuzz-subset0 libharfbuzz0b libjpeg62-turbo libjsoncpp25 libminizip1 libnspr4 libnss3 libopenh264-7
    libopenjp2-7 libopus0 libpng16-16 libsnappy1v5 libwayland-server0 libx11-6 libxau6 libxcb1 libxcomposite1
    libxdamage1 libxdmcp6 libxext6 libxfixes3 libxi6 libxkbcommon0 libxnvctrl0 libxrandr2 libxrender1 libxslt1.1
    libdav1d6 libflac12 liblcms2-2 libwebp7 libwebpdemux2 libwebpmux3 libgraphite2-3 libbsd0 libmd0
    libogg0 libicu72 libxml2 fonts-dejavu-core fontconfig-config libbrotli1 libexpat1 libgssapi-krb5-2 libkrb5-3
    libpulse0 libsndfile1 libasyncns0 libvorbis0a libvorbisenc2 libmpg123-0 libmp3lame0 libapparmor1 libsystemd0
    libcap2 liblz4-1 liblzma5 libzstd1 libgcrypt20 libgpg-error0 libk5crypto3 libkrb5support0 libkeyutils1 libcom-err2
)
unpack chromium "${NEEDED[@]}"
ROOT=$CACHE/chromium/root
export LD_LIBRARY_PATH=$ROOT/usr/lib/$ARCH:$ROOT/usr/lib/$ARCH/nss:$ROOT/usr/lib/$ARCH/pulseaudio:$ROOT/lib/$ARCH
exec "$ROOT/usr/lib/chromium/chromium-headless-shell" --no-sandbox --disable-gpu "$@"
