# The commands of ./dev. Sourced after lib.sh.

build="${WEFT_BUILD:-$root/build}"
jobs="${JOBS:-$(jobs)}"
export NINJA_STATUS='[%f/%t %es] '
# Two clones of the tree share compiled objects only with paths made relative; see cmake/Sanitizers.cmake.
export CCACHE_BASEDIR="$root" CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros

# In so many groups of tests a program is run, each a process, since loading LibTorch takes half a second; 0: each test
# alone, under its own name. Empty: as the folder has it. `test` says it.
test_groups=

# configure FOLDER [cmake arguments]
configure() {
  local folder="$1" torch
  shift
  torch="$(choose_libtorch "$folder")" || exit $?
  mkdir -p "$folder"
  local log="$folder/configure.log" together=()
  # Sixteen sources at once compile in a third of the time, sixty-four in a quarter: what includes LibTorch takes five
  # seconds before it compiles anything. After a change it is sixteen that compile again, so only what is built once
  # takes more. A folder that exists keeps what it has.
  local unity="${WEFT_UNITY:-$([ "${CI:-}" = true ] && echo 64 || echo 16)}"
  [ -e "$folder/CMakeCache.txt" ] || together=("-DWEFT_UNITY=$unity" "-DWEFT_UNITY_TESTS=$((unity > 16 ? unity : 16))")
  [ -z "$test_groups" ] || together+=("-DWEFT_TEST_GROUPS=$test_groups")
  # -O2 without -g: debug information of LibTorch's templates makes objects ten times as large.
  if ! cmake -S "$root" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O2 "-DWEFT_LIBTORCH=$torch" \
    "${together[@]}" "$@" >"$log" 2>&1; then
    cat "$log" >&2
    die "cmake could not configure $folder"
  fi
  sed -n 's/^-- weft: /dev: using /p' "$log" >&2
}

# The same of what is run from its folder and never installed: linked by lld, which reads LibTorch's tables of symbols in
# an eighth of the time.
configure_in_place() {
  local kind linker=()
  if command -v ld.lld >/dev/null; then
    # What a library needs it names itself; lld does not look there.
    for kind in EXE SHARED MODULE; do
      linker+=("-DCMAKE_${kind}_LINKER_FLAGS=-fuse-ld=lld -Wl,--allow-shlib-undefined")
    done
  fi
  configure "$@" "${linker[@]}"
}

build_targets() {
  local folder="$1"
  shift
  say "building in $folder with $jobs jobs${1:+: $*}"
  if [ "${CI:-}" = true ]; then
    # Every 25th line of progress: of a log that is cut, the end shall reach back over a build.
    ninja -C "$folder" -j "$jobs" "$@" | awk '!/^\[[0-9]+\// || ++n % 25 == 0 { print; fflush() }'
  else
    ninja -C "$folder" -j "$jobs" "$@"
  fi || die "the build failed"
}

command_build() {
  need_packages "${packages_build[@]}"
  configure_in_place "$build"
  build_targets "$build" "$@"
}

configure_release() {
  configure "$1" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -DWEFT_BUILD_TESTS=OFF -DWEFT_BUILD_EXAMPLES=OFF \
    -DWEFT_BUILD_BENCH=OFF
}

command_install() {
  [ $# = 1 ] && [ "${1#-}" = "$1" ] || { code=2 die "install wants one argument, the folder to install to: ./dev install PREFIX"; }
  local prefix="$1" folder="$build/release"
  # Before the build, which takes minutes.
  mkdir -p "$prefix" 2>/dev/null && [ -w "$prefix" ] \
    || { code=2 die "cannot write to $prefix: choose a folder of your own, for instance ./dev install \$HOME/.local/weft"; }
  prefix="$(cd "$prefix" && pwd)"
  need_packages "${packages_build[@]}"
  configure_release "$folder"
  build_targets "$folder"
  cmake --install "$folder" --prefix "$prefix" >"$folder/install.log" 2>&1 \
    || { cat "$folder/install.log" >&2; die "cmake could not install to $prefix"; }
  printf 'install: ok prefix=%s\nIn your project: find_package(weft REQUIRED), configured with -DCMAKE_PREFIX_PATH=%s\n' \
    "$prefix" "$prefix"
}

command_wheel() {
  [ $# = 0 ] || { code=2 die "wheel takes no arguments"; }
  local out="$build/wheel"
  need_packages "${packages_build[@]}" "${packages_wheel[@]}"
  rm -rf "$out"
  command_install "$out/prefix" >&2
  python3 "$root/scripts/wheel.py" --prefix "$out/prefix" --libtorch "$(choose_libtorch "$build/release")" --out "$out" \
    || die "the wheel could not be packed"
}

command_deb() {
  [ $# = 0 ] || { code=2 die "deb takes no arguments"; }
  local folder="$build/release" out="$build/deb" package
  need_packages "${packages_build[@]}" "${packages_deb[@]}"
  configure_release "$folder"
  build_targets "$folder"
  rm -rf "$out"
  mkdir -p "$out"
  (cd "$folder" && cpack -G DEB -B "$out") >"$folder/deb.log" 2>&1 \
    || { cat "$folder/deb.log" >&2; die "cpack could not make the package"; }
  package="$(find "$out" -maxdepth 1 -name '*.deb')"
  [ -n "$package" ] || die "cpack made no package; see $folder/deb.log"
  rm -rf "$out/_CPack_Packages"
  printf 'deb: ok %s\nInstall it with: apt-get install %s\n' "$package" "$package"
}

# Programs with gRPC and weft inside, which need LibTorch and the C library alone; see scripts/gpu_run.sh.
command_gpu_bundle() {
  local folder="$build/gpu-bundle" program kib
  # Programs of label gpu, and of the benchmarks with rows for GPUs.
  local -r tests=(cuda_test nccl_test) benches=(bench_weft_rpc bench_weft_nccl) libraries=(weft_cuda weft_nccl)
  local bundle="${1:-$folder/weft-gpu}"
  local -r most_mib=60
  [ ! -e "$bundle" ] || [ -e "$bundle/run.sh" ] || { code=2 die "$bundle is there, and no bundle"; }
  need_packages "${packages_build[@]}"
  need_venv full
  configure "$folder" -DWEFT_STATIC_GRPC=ON -DWEFT_BUILD_EXAMPLES=OFF -DWEFT_BUILD_TOOLS=OFF -DWEFT_INSTALL=OFF
  for program in cuda nccl; do
    grep -q "^-- weft: weft::$program (" "$folder/configure.log" \
      || die "the build has no weft::$program, see $folder/configure.log"
  done
  build_targets "$folder" "${libraries[@]}" "${tests[@]}" "${benches[@]}"
  rm -rf "$bundle"
  mkdir -p "$bundle"/{bin,lib,tests}
  for program in "${libraries[@]}"; do strip -o "$bundle/lib/lib$program.so" "$folder/lib/lib$program.so"; done
  for program in "${tests[@]}"; do strip -o "$bundle/tests/$program" "$folder/tests/$program"; done
  for program in "${benches[@]}"; do strip -o "$bundle/bin/$program" "$folder/bin/$program"; done
  # The benchmarks' own modules, and those of tools that they use.
  (cd "$root" && find bench tools -name '*.py' -exec cp --parents {} "$bundle" \;)
  cp "$root/scripts/gpu_run.sh" "$bundle/run.sh"
  for program in "$bundle"/{tests,bin,lib}/*; do
    if ldd "$program" | grep -E 'lib(grpc|protobuf|absl|weft_[a-z]*\.so)'; then die "$program needs the libraries above"; fi
  done
  tar -C "$(dirname "$bundle")" -czf "$bundle.tar.gz" "$(basename "$bundle")"
  kib="$(du -k --apparent-size "$bundle.tar.gz" | cut -f1)"
  [ "$kib" -le $((most_mib * 1024)) ] || die "$bundle.tar.gz has $kib KiB, more than $most_mib MiB"
  printf 'gpu-bundle: ok folder=%s archive=%s.tar.gz kib=%s\n' "$bundle" "$bundle" "$kib"
}

command_demo() {
  [ $# = 0 ] || { code=2 die "demo takes no arguments; build/bin/async_ps --help has the program's own"; }
  need_packages "${packages_build[@]}"
  configure_in_place "$build"
  build_targets "$build" weftrun async_ps
  local out="$build/demo" start seconds accuracy status=0
  mkdir -p "$out"
  start=$(date +%s.%N)
  say "starting 1 parameter server and 2 trainers"
  "$build/bin/weftrun" --role ps:1 --role trainer:2 "$build/bin/async_ps" \
    --data "$root/examples/data/digits.csv" --checkpoint "$out/model.pt" 2>&1 | tee "$out/log.txt" || status=$?
  [ "$status" = 0 ] || die "the demo failed with exit code $status; its output is in $out/log.txt"
  seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
  accuracy="$(sed -n 's/.*\baccuracy=\([01]\.[0-9]*\).*/\1/p' "$out/log.txt" | tail -n 1)"
  [ -n "$accuracy" ] || die "the demo printed no accuracy; its output is in $out/log.txt"
  awk -v a="$accuracy" 'BEGIN { exit !(a >= 0.95) }' || die "accuracy=$accuracy is below 0.95"
  printf 'demo: ok accuracy=%.3f seconds=%s\n' "$accuracy" "$seconds"
}

# What tests may rely on: see tests/README.md.
export_test_environment() {
  local venv
  venv="$(venv_dir full)"
  export WEFT_TEST_PYTHON="$venv/bin/python" WEFT_TORCHRUN="$venv/bin/torchrun"
  # Tests run side by side; LibTorch's default of one thread per core for each of them only makes them wait.
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}

# run_ctest FOLDER STRICT AT_ONCE [ctest arguments]
run_ctest() {
  local folder="$1" strict="$2" at_once="$3" status=0
  shift 3
  rm -rf "$folder/junit.xml" "$folder/tests/groups"
  ctest --test-dir "$folder" -j "$at_once" --output-on-failure --no-tests=error \
    --output-junit "$folder/junit.xml" "$@" || status=$?
  local options=()
  [ "$strict" = yes ] && options=(--strict)
  "$(find_python)" "$root/scripts/check_skips.py" "${options[@]}" "$folder/junit.xml" "$root/tests/allowed_skips" \
    "$folder/tests/groups" \
    || status=1
  [ "$status" = 0 ] || die "there are failures"
}

command_test() {
  local full=no only_build=no only_setup=no select=() labels=""
  while [ $# -gt 0 ]; do
    case "$1" in
      -L) labels="${2:?-L wants a label}"; select+=(-L "$2"); shift 2 ;;
      -R) select+=(-R "${2:?-R wants a regular expression}"); shift 2 ;;
      --full) full=yes; shift ;;
      --build-only) only_build=yes; shift ;;
      --setup-only) only_setup=yes; shift ;;
      *) usage >&2; code=2 die "test does not know $1" ;;
    esac
  done
  local left_out=()
  [[ "$labels" == *soak* ]] || left_out+=(soak)
  [[ "$labels" == *versions* ]] || left_out+=(versions)
  # One expression: of several, ctest leaves out what all of them match.
  [ ${#left_out[@]} = 0 ] || select+=(-LE "^($(IFS='|'; echo "${left_out[*]}"))\$")
  need_packages "${packages_build[@]}"
  if [[ "$labels" == *soak* ]]; then need_packages --no-services "${packages_soak[@]}"; fi
  if [[ "$labels" == *versions* ]]; then
    need_packages "${packages_versions[@]}"
    need_venv newest
    WEFT_NEWEST_LIBTORCH="$(venv_torch newest)"
    export WEFT_NEWEST_LIBTORCH
  fi
  if [ "$full" = yes ]; then need_packages --no-services "${packages_full[@]}"; fi
  need_venv full
  [ "$only_setup" = no ] || return 0
  # -R names single tests.
  [[ " ${select[*]} " == *" -R "* ]] && test_groups=0 || test_groups=6
  configure_in_place "$build"
  build_targets "$build"
  [ "$only_build" = no ] || return 0
  export_test_environment
  local strict=no
  if [ "$full" = yes ]; then export WEFT_TEST_FULL=1; fi
  if [ "$full" = yes ] || [ "${CI:-}" = true ]; then strict=yes; fi
  # One more at a time than there are cores, for a third of a test's time is waiting, for leases and deadlines of others.
  # A test between processes waits most of its time, and counts as half of one that has PROCESSORS 2 in the CMakeLists.
  # The others would take each single place that comes free, so what has PROCESSORS 2 comes first (COST), a waiting one beside it.
  run_ctest "$build" "$strict" "$((2 * (jobs + 1) + 1))" "${select[@]}"
}

command_bench() {
  [ $# -gt 0 ] || { code=2 die "bench wants a suite: rpc, rref, autograd, collectives, ddp, pipeline, ps"; }
  need_packages "${packages_build[@]}"
  if [ "$1" = collectives ]; then need_packages --no-services "${packages_peers[@]}"; fi
  need_venv full
  configure_in_place "$build"
  # It builds the drivers of the suite by itself.
  WEFT_BUILD_DIR="$build" "$(venv_dir full)/bin/python" "$root/bench/run.py" "$@"
}

sources() { git -c safe.directory='*' ls-files --cached --others --exclude-standard -- '*.h' '*.cc' "$@"; }

command_format() {
  need_packages "${packages_lint[@]}"
  sources | xargs -r clang-format-14 -i
}

# Needs no build and nothing installed: what it shows stands in the tree.
command_docs() {
  [ $# = 0 ] || { code=2 die "docs takes no arguments"; }
  command -v python3 >/dev/null || { code=2 die "there is no python3"; }
  python3 "$root/scripts/docs/make_site.py" --out "$build/docs" || die "the documentation has warnings; they are listed above"
}

command_release() {
  command -v python3 >/dev/null || { code=2 die "there is no python3"; }
  python3 "$root/scripts/release.py" "$@"
}

command_lint() {
  need_packages "${packages_build[@]}" "${packages_lint[@]}"
  configure_in_place "$build"
  # Only what the generated headers need.
  if ninja -C "$build" -t query weft_proto_headers >/dev/null 2>&1; then
    build_targets "$build" weft_proto_headers
  fi
  "$(find_python)" "$root/scripts/lint.py" --build "$build" --jobs "$jobs"
}

# Several sources at once take less than half the time; that each includes what it uses is for the other build to show.
clang_arguments=(-DCMAKE_CXX_COMPILER=clang++-14 -DCMAKE_C_COMPILER=clang-14 -DWEFT_BUILD_BENCH=OFF)

configure_asan() {
  need_packages "${packages_build[@]}" "${packages_clang[@]}"
  # One folder for the sanitizers and the fuzz targets: what both need is built once.
  configure_in_place "$build/asan" "${clang_arguments[@]}" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 \
    "-DWEFT_SANITIZE=address;undefined" -DWEFT_FUZZ=ON -DWEFT_TEST_SET=sanitizer -DWEFT_BUILD_EXAMPLES=OFF \
    -DWEFT_BUILD_TOOLS=OFF
}

# What a slow machine runs of a sanitizer's pass: the programs whose subject reads what others sent, or has threads of
# its own. The others are simulations, which run one thread at a time, and pure functions.
brief_tests=(common_test contract_arena_test contract_grpc_transport_test contract_store_test contract_transport_test
  rpc_test rpc_typed_test rref_test collectives_test dist_autograd_test ps_test pipeline_test)

# sanitize FOLDER [--brief] [ctest arguments]
sanitize() {
  local folder="$1" strict=no targets=() select=() program
  shift
  if [ "${1:-}" = --brief ]; then
    shift
    for program in "${brief_tests[@]}"; do
      # Not every program is in every pass.
      ! ninja -C "$folder" -t query "$program" >/dev/null 2>&1 || targets+=("$program")
    done
    select=(-R "^($(IFS='|'; echo "${targets[*]}"))([.]|$)")
    say "brief: ${targets[*]}, and no other program"
  fi
  build_targets "$folder" "${targets[@]}"
  [ "${CI:-}" != true ] || strict=yes
  export OMP_NUM_THREADS=1
  run_ctest "$folder" "$strict" "$((jobs + 2))" -LE '^soak$' "${select[@]}" "$@"
}

command_asan() {
  configure_asan
  # Absurd sizes must come back as errors, as they do from the plain allocator.
  local asan=detect_leaks=1:detect_stack_use_after_return=1:strict_init_order=1:allocator_may_return_null=1
  export ASAN_OPTIONS="${ASAN_OPTIONS:-$asan}"
  export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
  sanitize "$build/asan" "$@"
}

command_tsan() {
  need_packages "${packages_build[@]}" "${packages_clang[@]}"
  configure_in_place "$build/tsan" "${clang_arguments[@]}" -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -DWEFT_SANITIZE=thread \
    -DWEFT_TEST_SET=thread -DWEFT_BUILD_EXAMPLES=OFF -DWEFT_BUILD_TOOLS=OFF
  # Where threads and memory that they share are made; what stands on them is compiled only for a whole pass.
  local brief_tests=(common_test contract_arena_test contract_store_test contract_transport_test rpc_test rref_test
    collectives_test)
  # LibTorch is not instrumented: its reference counts are invisible to TSan, its deletes are not. No suppressions.
  export TSAN_OPTIONS="ignore_noninstrumented_modules=1:second_deadlock_stack=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
  sanitize "$build/tsan" "$@"
}

command_fuzz() {
  local amount=--seconds number="${1:-60}"
  if [ "${1:-}" = --executions ]; then
    amount=--executions number="${2:-}"
    [ $# -le 2 ] || { code=2 die "fuzz takes --executions N and no more"; }
  elif [ $# -gt 1 ]; then
    code=2 die "fuzz takes a number of seconds or --executions N"
  fi
  [[ "$number" =~ ^[1-9][0-9]*$ ]] || { code=2 die "fuzz wants a number, of seconds or of --executions, not '$number'"; }
  configure_asan
  local list="$build/asan/tests/fuzzers.txt"
  [ -s "$list" ] || die "there are no fuzz targets"
  build_targets "$build/asan" $(cut -d' ' -f1 "$list")
  "$(find_python)" "$root/scripts/fuzz.py" --build "$build/asan" "$amount" "$number" --jobs "$jobs" \
    --table "$build/asan/fuzz.md"
}
