"""What the site takes from sources: environment variables, metrics, and the help of the command lines."""
import ast
import os
import re

PROGRAMS = (("weftrun", "tools/weftrun/options.cc"), ("weftrun ca", "tools/weftrun/ca.cc"), ("weft-inspect", "tools/weft_inspect.cc"),
            ("weft-plan", "tools/weft_plan.cc"), ("./dev", "dev"))
SCRIPTS = ("tools/backward_path.py", "tools/otlp.py", "tools/netlab.py")
SOURCES = ("common", "transport", "store", "rpc", "rref", "collectives", "dist_autograd", "dist_optim", "ps", "pipeline", "tools")
# Variables that no table of a page has.
ALONE = (("WEFT_COLLECTIVES_TABLE", "file with rules about which algorithm an operation takes; that of rank 0 counts",
          "docs/collectives.md"),)
LITERAL = r'"((?:\\.|[^"\\\n])*)"'


def read(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as file:
        return file.read()


def joined(literals):
    """The text of C++ string literals that stand side by side."""
    return "".join(part.encode().decode("unicode_escape") for part in re.findall(LITERAL, literals))


def settings(root):
    """(variable, type, default, help, name in Config) of each row of common/config.h."""
    text = read(root, "common/config.h")
    table = text[text.index("#define WEFT_CONFIG_KEYS(X)"):]
    table = re.sub(r"\\\n\s*", " ", table).split("\n\n")[0]
    rows = []
    for match in re.finditer(r'X\(([\w:]+), (\w+), (.+?), "(\w+)",\s*((?:"(?:\\.|[^"\\])*"\s*)+)\)', table):
        kind, name, default, variable, text_of = match.groups()
        rows.append((variable, kind, default, joined(text_of), name))
    if len(rows) != len(re.findall(r"\bX\(", table)):
        raise ValueError("a row of WEFT_CONFIG_KEYS could not be read")
    return rows


def default_text(kind, text):
    """A default as a user writes it."""
    number = re.match(r"absl::(Seconds|Microseconds|Milliseconds)\((\d+)\)", text)
    if number:
        return number.group(2) + {"Seconds": "s", "Microseconds": "us", "Milliseconds": "ms"}[number.group(1)]
    shifted = re.match(r"uint64_t\{(\d+)\} << (\d+)", text)
    if shifted:
        base, bits = int(shifted.group(1)), int(shifted.group(2))
        return f"{base << (bits % 10)} {('B', 'KiB', 'MiB', 'GiB')[bits // 10]}"
    if text.startswith("Severity::k"):
        return text[len("Severity::k"):].lower()
    return {"std::nullopt": "", '""': ""}.get(text, text)


def other_variables(root):
    """Variables beside Config's, by the tables of pages: (variable, meaning, page)."""
    found = {row[0]: row for row in ALONE}
    known = {row[0] for row in settings(root)}
    for page in ("docs/launch.md", "docs/collectives.md", "tests/README.md", "docs/stores.md", "docs/transport.md"):
        for line in read(root, page).splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if line.startswith("| `") and len(cells) >= 2:
                for variable in re.findall(r"`([A-Z][A-Z_]+)`", cells[0]):
                    if variable not in known:
                        found.setdefault(variable, (variable, cells[1], page))
    return sorted(found.values())


def variables_in_sources(root):
    """Every variable of weft's that a source of the libraries or tools names: variable -> file."""
    found = {}
    for folder in SOURCES:
        for path, _, files in os.walk(os.path.join(root, folder)):
            for name in sorted(files):
                if name.endswith((".cc", ".h")):
                    relative = os.path.relpath(os.path.join(path, name), root)
                    for variable in re.findall(r'"(WEFT(?:RUN)?_[A-Z_]+)"', read(root, relative)):
                        found.setdefault(variable, relative)
    return found


def metrics(root):
    """(name, kind, help, file) of each metric whose name stands in a source, as one piece."""
    found = {}
    call = re.compile(r'\b(counter|gauge|histogram)\(\s*"(weft_\w+)",\s*((?:"(?:\\.|[^"\\\n])*"\s*)+)', re.S)
    for folder in SOURCES:
        for path, _, files in os.walk(os.path.join(root, folder)):
            for name in sorted(files):
                if name.endswith((".cc", ".h")):
                    relative = os.path.relpath(os.path.join(path, name), root)
                    code = re.sub(r"^\s*//.*$", "", read(root, relative), flags=re.M)
                    for kind, metric, text in call.findall(code):
                        found.setdefault(metric, (metric, kind, joined(text), relative))
    return [found[name] for name in sorted(found)]


def metric_problem(name, kind, text):
    """What Prometheus's conventions ask for and is not so; '' if all is."""
    if not text.strip():
        return "has no help"
    if name.endswith("_total") != (kind == "counter"):
        return "is a counter and does not end in _total, or the reverse"
    odd = re.search(r"_(us|ms|ns|minutes|kib|mib|count|sum|bucket)(_|$)", name)
    return f"has '{odd.group(1)}' in its name, which is no base unit" if odd else ""


def helps(root):
    """(program, its --help) of each command line."""
    found = []
    for program, path in PROGRAMS:
        text = read(root, path)
        if path == "dev":
            body = re.search(r"<<'TEXT'\n(.*?)^TEXT$", text, re.S | re.M).group(1)
        else:
            body = "\n".join(re.findall(r'k\w*Usage(?:\[\])? =\s*R"\((.*?)\)"', text, re.S))
        if not body.strip():
            raise ValueError(f"{path}: no help text")
        found.append((program, body))
    for path in SCRIPTS:
        found.append((path, ast.get_docstring(ast.parse(read(root, path))) or ""))
    return found
