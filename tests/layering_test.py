"""Layers: a module includes only modules to its left, and none includes another module's internal headers.

    common -> proto -> transport -> store -> rpc -> { rref , collectives } -> dist_autograd -> dist_optim -> { ps , pipeline }

usage: layering_test.py [ROOT]            checks the tree
       layering_test.py --self-test       plants one violation of each kind and checks that it is found

What is counted, and must be zero:
  up        an include of a module to the right, of a sibling in braces, or of the umbrella header
  internal  an internal/ header in a public header, or in another module (common/internal/ excepted, in sources)
  private   a generated protobuf header, gRPC or protobuf in a public header: they are not part of the interface
  heavy     torch/torch.h and its equals in a header
  foreign   LibTorch, gRPC or protobuf in common; LibTorch or gRPC in proto; LibTorch in transport or store
  spelling  an include of our own that is not spelled "weft/<module>/<file>.h"
  cycle     units of a module (a header and the source of its name) that include each other in a ring of more than
            MOST_IN_A_CYCLE, and any ring of headers. A public header whose implementation knows internals has its
            source in internal/.
"""
import os
import re
import sys
import tempfile

ORDER = ["common", "proto", "transport", "store", "rpc", ("rref", "collectives"), "dist_autograd", "dist_optim", ("ps", "pipeline")]
LEVEL = {name: level for level, group in enumerate(ORDER)
         for name in (group if isinstance(group, tuple) else (group,))}
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
HEAVY = ("torch/torch.h", "torch/all.h", "torch/nn.h", "torch/nn/module.h", "torch/optim.h", "torch/types.h",
         "torch/extension.h", "ATen/ATen.h")
LIBTORCH = ("ATen/", "torch/", "c10/")
GRPC = ("grpc/", "grpcpp/")
MOST_IN_A_CYCLE = 4
PROTOBUF = ("google/protobuf/",)


def source_files(root):
    for module in LEVEL:
        for folder, _, names in os.walk(os.path.join(root, module)):
            for name in sorted(names):
                if name.endswith((".h", ".cc", ".cu", ".cuh")):
                    yield module, os.path.relpath(os.path.join(folder, name), root)


def check_include(module, path, quote, include):
    """Yields (kind, why) for what is wrong with one include."""
    header = path.endswith((".h", ".cuh"))
    public = header and "internal" not in path.split(os.sep)
    if include == "weft/weft.h":
        yield "up", "the umbrella header stands above all modules"
        return
    if include.startswith("weft/"):
        parts = include.split("/")
        target = parts[1]
        if target not in LEVEL:
            yield "spelling", f"there is no module {target}"
            return
        if target != module and LEVEL[target] >= LEVEL[module]:
            kind = "sideways" if LEVEL[target] == LEVEL[module] else "upward"
            yield "up", f"{module} may not see {target} ({kind})"
        if "internal" in parts:
            if public:
                yield "internal", "a public header may not include an internal one"
            elif target not in (module, "common"):
                yield "internal", f"internal/ of {target} belongs to {target}"
        if include.endswith(".pb.h") and public:
            yield "private", "generated headers are not installed"
        if quote != '"':
            yield "spelling", 'our own includes are in quotes: "weft/..."'
        return
    if include.split("/")[0] in LEVEL or (quote == '"' and include.startswith((".", "internal/"))):
        yield "spelling", 'our own includes are spelled "weft/<module>/<file>.h"'
    if header and include in HEAVY:
        yield "heavy", "it costs seconds in every file that includes this header"
    if public and include.startswith(GRPC + PROTOBUF):
        yield "private", "gRPC and protobuf stay behind internal/"
    if module == "common" and include.startswith(LIBTORCH + GRPC + PROTOBUF):
        yield "foreign", "common knows Abseil and the standard library only"
    if module in ("transport", "store") and include.startswith(LIBTORCH):
        yield "foreign", f"{module} knows no tensors"
    if module == "proto" and include.startswith(LIBTORCH + GRPC):
        yield "foreign", "proto knows protobuf only"


def rings(graph):
    """The strongly connected parts of a graph {name: set of names} that have more than one member."""
    order, low, stack, out = {}, {}, [], []

    def visit(name):
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph.get(name, ())):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                out.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return out


def check_cycles(includes):
    """`includes`: {file: files of ours that it includes}. Yields (kind, line of text)."""
    def units(path):
        return os.path.splitext(path)[0]

    between = {}
    for path, others in includes.items():
        between.setdefault(units(path), set()).update(units(o) for o in others if units(o) != units(path))
    for ring in rings(between):
        if len(ring) > MOST_IN_A_CYCLE:
            yield "cycle", f"cycle: {len(ring)} units include each other: {', '.join(ring)}"
    for ring in rings({path: others for path, others in includes.items() if path.endswith((".h", ".cuh"))}):
        yield "cycle", f"cycle: headers include each other: {', '.join(ring)}"


def check_tree(root):
    """Returns (number of files, list of (kind, line of text))."""
    found = []
    files = 0
    includes = {}
    for module, path in source_files(root):
        files += 1
        text = open(os.path.join(root, path), errors="replace").read()
        # Comments go, line breaks stay: an include in an example is not an include.
        code = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
        code = re.sub(r"^[ \t]*//.*$", "", code, flags=re.M)
        ours = includes.setdefault(path, set())
        for match in INCLUDE.finditer(code):
            if match.group(2).startswith("weft/"):
                ours.add(match.group(2)[len("weft/"):])
            line = code.count("\n", 0, match.start()) + 1
            for kind, why in check_include(module, path, match.group(1), match.group(2)):
                found.append((kind, f"{path}:{line}: {kind}: {match.group(2)}: {why}"))
    known = {path: {o for o in ours if o in includes} for path, ours in includes.items()}
    found.extend(check_cycles(known))
    return files, found


def self_test():
    planted = {
        "common/a.h": ('#include "weft/rpc/b.h"\n', "up"),
        "common/b.cc": ("#include <ATen/core/Tensor.h>\n", "foreign"),
        "rref/a.cc": ('#include "weft/collectives/work.h"\n', "up"),
        "rpc/a.cc": ('#include "weft/weft.h"\n', "up"),
        "rpc/b.h": ('#include "weft/rpc/internal/x.h"\n', "internal"),
        "rpc/c.h": ('#include "weft/proto/rpc.pb.h"\n', "private"),
        "rpc/d.h": ("#include <grpcpp/grpcpp.h>\n", "private"),
        "rpc/internal/e.h": ("#include <torch/torch.h>\n", "heavy"),
        "rpc/f.cc": ('#include "rpc/b.h"\n', "spelling"),
        "rref/internal/g.cc": ('#include "weft/rpc/internal/x.h"\n', "internal"),
        "proto/h.cc": ("#include <grpcpp/grpcpp.h>\n", "foreign"),
        "transport/i.cc": ('#include "weft/store/store.h"\n', "up"),
        "store/j.cc": ('#include "weft/rpc/worker.h"\n', "up"),
        "store/k.cc": ("#include <ATen/core/Tensor.h>\n", "foreign"),
        "store/l.cc": ('#include "weft/transport/internal/grpc/core.h"\n', "internal"),
    }
    clean = {
        "rpc/internal/ok.cc": '// #include "weft/ps/x.h"\n#include "weft/rpc/internal/x.h"\n'
                              '#include "weft/common/internal/dl.h"\n#include "weft/proto/rpc.pb.h"\n'
                              "#include <grpcpp/grpcpp.h>\n",
        "rpc/ok.h": '#include <ATen/core/Tensor.h>\n#include "absl/status/status.h"\n#include "weft/common/api.h"\n',
        "dist_autograd/ok.cc": '#include "weft/rref/rref.h"\n#include "weft/collectives/work.h"\n',
    }
    wrong = 0

    def ring(count, end):
        return {f"rpc/internal/u{i}{end}": {f"rpc/internal/u{(i + 1) % count}.h"} for i in range(count)}

    # Rings of sources that include the next header: too long, and the longest that may be. Headers may not at all.
    for includes, kinds in [(ring(5, ".cc"), ["cycle"]), (ring(4, ".cc"), []), (ring(2, ".h"), ["cycle"])]:
        if [kind for kind, _ in check_cycles(includes)] != kinds:
            wrong += 1
            print(f"self-test: {includes}: expected {kinds}")
    for path, (text, kind) in list(planted.items()) + [(p, (t, None)) for p, t in clean.items()]:
        with tempfile.TemporaryDirectory() as root:
            os.makedirs(os.path.join(root, os.path.dirname(path)))
            with open(os.path.join(root, path), "w") as out:
                out.write(text)
            kinds = [found for found, _ in check_tree(root)[1]]
            if kinds != ([kind] if kind else []):
                wrong += 1
                print(f"self-test: {path}: expected {kind}, found {kinds}: {text.strip()}")
    print(f"self-test: {len(planted)} planted violations, {len(clean)} clean files, {wrong} wrong answers")
    return 1 if wrong else 0


def main():
    if "--self-test" in sys.argv[1:]:
        return self_test()
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files, found = check_tree(root)
    for _, line in found:
        print(line)
    print(f"layering: {files} files, {len(found)} violations")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
