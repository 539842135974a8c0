#!/usr/bin/env bash
# make_credentials.sh DIR NAME...: an authority, a certificate and key for each worker, and a token, with openssl.
# DIR is also what `weftrun --tls DIR` takes. The authority's key does not stay: run it again for other workers.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 DIR NAME..." >&2; exit 2; }
dir="$1"
shift
umask 077
mkdir -p "$dir"
cd "$dir"
trap 'rm -f ca.key ca.srl ./*.csr ./*.ext' EXIT

new_key=(-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes)
openssl req -x509 "${new_key[@]}" -days 30 -subj "/CN=authority of secure_rpc" -keyout ca.key -out ca.pem 2>/dev/null
for name in "$@"; do
  # The URI is what binds the certificate to the worker's name.
  printf 'subjectAltName=URI:weft://worker/%s,DNS:worker.weft\nextendedKeyUsage=serverAuth,clientAuth\n' "$name" >"$name.ext"
  openssl req "${new_key[@]}" -subj "/CN=$name" -keyout "$name.key" -out "$name.csr" 2>/dev/null
  openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile "$name.ext" \
    -out "$name.pem" 2>/dev/null
done
openssl rand -hex 32 >token
echo "made in $dir: ca.pem, token, and NAME.pem and NAME.key for $*"
