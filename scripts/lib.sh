# Pieces of ./dev: talking, packages, environments. Sourced, with $root set to the clone.

say() { printf 'dev: %s\n' "$*" >&2; }
die() { printf 'dev: %s\n' "$*" >&2; exit "${code:-1}"; }

jobs() { nproc 2>/dev/null || echo 2; }

# Runs a command up to three times: mirrors and indexes have bad minutes.
retry() {
  local attempt
  for attempt in 1 2 3; do
    "$@" && return 0
    [ "$attempt" = 3 ] || say "attempt $attempt of 3 failed ($1), trying again"
  done
  return 1
}

# --- Debian packages -------------------------------------------------------------------------------------------

packages_build=(g++ lld cmake ninja-build ccache pkg-config git python3 python3-venv
  libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
  libssl-dev openssl zlib1g-dev libc-ares-dev libre2-dev
  libgtest-dev libgmock-dev libbenchmark-dev prometheus-cpp-dev spin)
packages_clang=(clang-14 libclang-rt-14-dev llvm-14)
packages_wheel=(patchelf binutils)
# What the tests of label versions build with, beside the compilers and the LibTorch of everything else.
packages_versions=(clang-19)
# promtool, and what makes a fresh Debian: for tests of label soak.
packages_soak=(prometheus mmdebstrap)
packages_deb=(dpkg-dev)
packages_lint=(clang-format-14 clang-tidy-14)
# Peers of the benchmarks of collectives.
packages_peers=(openmpi-bin libopenmpi-dev mpich libmpich-dev)
packages_full=(etcd-server openmpi-bin libopenmpi-dev slurm-wlm munge iproute2 python3-yaml)

missing_packages() {
  local package
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || printf '%s ' "$package"
  done
}

# as_root CMD...: directly, or through sudo.
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -- "$@"; fi
}

# need_packages [--no-services] PACKAGE...: installs what is missing, or says which command would.
need_packages() {
  local services=yes missing
  if [ "$1" = --no-services ]; then services=no; shift; fi
  if ! command -v dpkg-query >/dev/null; then
    say "this is not a Debian system; I take it that the counterparts of these are there: $*"
    return 0
  fi
  missing="$(missing_packages "$@")"
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null || { ! sudo -n true 2>/dev/null && [ ! -t 0 ]; }; then
      say "these Debian packages are missing, and I am not root: $missing"
      printf '\nRun this as root, then run ./dev again:\n\n    apt-get update && apt-get install -y --no-install-recommends %s\n\n' "$missing" >&2
      exit 2
    fi
  fi
  say "installing Debian packages: $missing"
  local log install=(apt_get install)
  [ "$services" = yes ] || install=(without_services apt_get install)
  log="$(mktemp)"
  # Without an index that is fresh the packages may still be had; if not, the second command says so.
  if ! { apt_get update || true; "${install[@]}" $missing; } >"$log" 2>&1; then
    tail -n 25 "$log" >&2
    rm -f "$log"
    die "apt-get could not install them; the command was: apt-get install -y --no-install-recommends $missing"
  fi
  rm -f "$log"
}

apt_get() {
  local verb="$1"
  shift
  if [ "$verb" = install ]; then set -- -y --no-install-recommends "$@"; fi
  retry as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$verb" "$@"
}

# Runs a command while packages may not start their services (policy-rc.d says 101); what was there comes back.
without_services() (
  local policy=/usr/sbin/policy-rc.d saved="" result
  if as_root test -e "$policy"; then
    saved="$policy.weft-saved"
    as_root mv "$policy" "$saved"
  fi
  restore_policy() {
    if [ -n "$saved" ]; then as_root mv "$saved" "$policy"; else as_root rm -f "$policy"; fi
  }
  trap restore_policy EXIT
  trap 'exit 130' INT TERM
  printf '#!/bin/sh\nexit 101\n' | as_root tee "$policy" >/dev/null
  as_root chmod 755 "$policy"
  "$@"
  result=$?
  exit $result
)

# --- Python environments ---------------------------------------------------------------------------------------

cache="${WEFT_CACHE:-$HOME/.cache/weft}"
torch_version=2.11.0
# libtorch_cpu.so of the CUDA wheel wants libcudart.so.13 and libcupti.so.13, even where there is no GPU.
wheels_lean=("torch==$torch_version" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85)
wheels_full=("torch==$torch_version" numpy)
# The newest there is on PyPI, for the label versions (docs/versions.md).
wheels_newest=(torch==2.15.0 nvidia-cuda-runtime==13.2.86 nvidia-cuda-cupti==13.2.86)

find_python() {
  local candidate
  for candidate in /usr/bin/python3 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# venv_dir lean|full|newest: where that environment lies, or will lie. The name holds a hash of the wheels and of the
# interpreter's version, so that a change of either makes a new one and a second clone uses the same.
venv_dir() {
  local -n wheels="wheels_$1"
  local python hash
  python="$(find_python)" || { code=2 die "no python3 of at least 3.10 with venv and ensurepip (Debian: python3-venv)"; }
  hash="$( { "$python" -c 'import sys; print(sys.version_info[:2])'; printf '%s\n' "$1" "${wheels[@]}"; } | sha256sum | cut -c1-12)"
  printf '%s/%s-%s\n' "$cache" "$1" "$hash"
}

venv_ready() { [ -e "$(venv_dir "$1")/.complete" ]; }

# need_venv lean|full|newest: makes it when it is not there. Two ./dev at once wait for each other.
need_venv() {
  local kind="$1" dir python size
  local -n list="wheels_$1"
  dir="$(venv_dir "$kind")" || exit $?
  [ -e "$dir/.complete" ] && return 0
  mkdir -p "$cache"
  exec 9>"$dir.lock"
  flock -n 9 || { say "another ./dev is making the $kind Python environment, waiting for it"; flock 9; }
  if [ ! -e "$dir/.complete" ]; then
    size="about 1.5 GB on disk"
    [ "$kind" = full ] && size="about 5 GB on disk"
    say "making the $kind Python environment ($size) in $dir: ${list[*]}"
    python="$(find_python)"
    rm -rf "$dir"
    "$python" -m venv "$dir" || die "python -m venv $dir failed"
    local options=(--quiet --disable-pip-version-check)
    [ "$kind" = full ] || options+=(--no-deps)
    retry "$dir/bin/pip" install "${options[@]}" "${list[@]}" \
      || die "pip could not install ${list[*]} into $dir"
    touch "$dir/.complete"
  fi
  exec 9>&-
}

venv_torch() {
  local found=("$(venv_dir "$1")"/lib/python3*/site-packages/torch)
  [ -d "${found[0]}" ] || die "there is no torch in $(venv_dir "$1")"
  printf '%s\n' "${found[0]}"
}

# Which LibTorch to build with. What a build folder already uses stays (another one means building it all again),
# then the user's own, then the full environment when it is there, then the lean one, which is made if needed.
choose_libtorch() {
  local folder="$1" known
  known="$(sed -n 's/^WEFT_LIBTORCH:[A-Z]*=//p' "$folder/CMakeCache.txt" 2>/dev/null)"
  if [ -n "${WEFT_LIBTORCH:-}" ]; then
    printf '%s\n' "$WEFT_LIBTORCH"
  elif [ -n "$known" ] && [ -e "$known/lib/libtorch_cpu.so" ]; then
    printf '%s\n' "$known"
  elif venv_ready full; then
    venv_torch full
  else
    need_venv lean >&2
    venv_torch lean
  fi
}
