"""Draws docs/architecture.svg, the modules and who includes whom, from the includes themselves.

usage: architecture.py            writes docs/architecture.svg
       architecture.py --check    fails when the file does not show the tree as it is
       architecture.py --print    the numbers behind the picture, as text

Each box is a module with its purpose; it may include only what stands left of it. An arrow says that a module includes
headers of another one; a module that is used by nearly all of those to its right is said so in its box instead, so that the
arrows that are left can be followed.
"""
import argparse
import os
import re
import sys
from xml.sax.saxutils import escape

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COLUMNS = [["common"], ["proto"], ["transport"], ["store"], ["rpc"], ["rref", "collectives"], ["dist_autograd"],
           ["dist_optim"], ["ps", "pipeline"]]
PURPOSE = {
    "common": ["futures, executors", "runtime, simulator"],
    "proto": ["the wire,", "comments first"],
    "transport": ["frames to a peer,", "bulk bytes, TLS"],
    "store": ["where workers", "meet"],
    "rpc": ["typed calls,", "membership"],
    "rref": ["remote objects,", "counted"],
    "collectives": ["process groups,", "data parallelism"],
    "dist_autograd": ["backward across", "workers"],
    "dist_optim": ["optimizers across", "workers"],
    "ps": ["parameter server:", "tables"],
    "pipeline": ["plans, proved", "and run"],
}
INCLUDE = re.compile(r'^\s*#\s*include\s+"weft/([a-z_]+)/', re.M)
BASE = ("common", "proto")  # included nearly everywhere: no arrows

BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y = 126, 74, 34, 46


def measure(root):
    """module -> (files, {other module: number of includes})."""
    found = {}
    for module in [name for column in COLUMNS for name in column]:
        files, uses = 0, {}
        for folder, _, names in sorted(os.walk(os.path.join(root, module))):
            for name in sorted(names):
                if not name.endswith((".h", ".cc", ".cu", ".cuh")):
                    continue
                files += 1
                text = open(os.path.join(folder, name), errors="replace").read()
                for other in INCLUDE.findall(text):
                    if other != module:
                        uses[other] = uses.get(other, 0) + 1
        if files or os.path.isdir(os.path.join(root, module)):
            found[module] = (files, uses)
    return found


def draw(found):
    columns = [[name for name in column if name in found] for column in COLUMNS]
    columns = [column for column in columns if column]
    tallest = max(len(column) for column in columns)
    height = 70 + tallest * (BOX_HEIGHT + GAP_Y) + 60
    width = 40 + len(columns) * (BOX_WIDTH + GAP_X)
    middle = 60 + (tallest * (BOX_HEIGHT + GAP_Y) - GAP_Y) / 2 + 40
    place = {}
    for i, column in enumerate(columns):
        top = middle - (len(column) * (BOX_HEIGHT + GAP_Y) - GAP_Y) / 2
        for j, name in enumerate(column):
            place[name] = (20 + i * (BOX_WIDTH + GAP_X), top + j * (BOX_HEIGHT + GAP_Y))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" font-family="sans-serif" role="img" '
           f'aria-label="The modules of weft and their includes">',
           '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
           '<path d="M0,0 L8,4 L0,8 z" fill="#5b6b7b"/></marker></defs>',
           f'<rect width="{width}" height="{height:.0f}" fill="#ffffff"/>',
           '<text x="20" y="28" font-size="15" fill="#1f2933">A module includes only modules to its left; siblings of a column '
           'do not see each other.</text>']
    # A neighbour's arrow is straight, a longer one passes above or below the boxes between.
    lanes = {"up": 0, "down": 0}
    order = {name: i for i, column in enumerate(columns) for name in column}
    for name in sorted(found, key=lambda n: (order[n], n)):
        for other in sorted(found[name][1], key=lambda n: (order.get(n, -1), n)):
            if other in BASE or other not in place:
                continue
            x1, y1 = place[name]
            x2, y2 = place[other]
            style = 'fill="none" stroke="#5b6b7b" stroke-width="1.2" marker-end="url(#head)"'
            if order[name] - order[other] == 1:
                out.append(f'<path d="M{x1},{y1 + BOX_HEIGHT / 2:.1f} L{x2 + BOX_WIDTH + 2},{y2 + BOX_HEIGHT / 2:.1f}" {style}/>')
                continue
            up = y1 + BOX_HEIGHT / 2 <= middle
            side = "up" if up else "down"
            lanes[side] += 1
            reach = order[name] - order[other]
            bend = (min(place[n][1] for n in place) - 14 * reach) if up else (
                max(place[n][1] for n in place) + BOX_HEIGHT + 14 * reach)
            start = (x1 + 24, y1 if up else y1 + BOX_HEIGHT)
            end = (x2 + BOX_WIDTH - 24, y2 if up else y2 + BOX_HEIGHT)
            out.append(f'<path d="M{start[0]},{start[1]:.1f} C{start[0]},{bend:.1f} {end[0]},{bend:.1f} {end[0]},{end[1]:.1f}" '
                       f'{style} opacity="0.75"/>')
    for name, (x, y) in place.items():
        files, uses = found[name]
        fill = "#e8f0fa" if name not in BASE else "#f3f1e7"
        out.append(f'<rect x="{x}" y="{y:.1f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="#8aa0b6"/>')
        out.append(f'<text x="{x + 8}" y="{y + 20:.1f}" font-size="14" font-weight="bold" fill="#1f2933">{escape(name)}</text>')
        for k, line in enumerate(PURPOSE[name]):
            out.append(f'<text x="{x + 8}" y="{y + 38 + 14 * k:.1f}" font-size="11" fill="#3e4c59">{escape(line)}</text>')
        if name in BASE:
            out.append(f'<text x="{x + 8}" y="{y + 67:.1f}" font-size="9.5" fill="#7b8794">used by all</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true", dest="show")
    args = parser.parse_args()
    found = measure(ROOT)
    if args.show:
        for name, (files, uses) in found.items():
            print(f"{name}: {files} files; includes " + ", ".join(f"{n} x{c}" for n, c in sorted(uses.items())))
        return 0
    picture = draw(found)
    path = os.path.join(ROOT, "docs", "architecture.svg")
    if args.check:
        there = open(path).read() if os.path.exists(path) else ""
        if there != picture:
            print("docs/architecture.svg does not show the tree as it is: run python3 tools/architecture.py")
            return 1
        print(f"architecture: {len(found)} modules, the picture is up to date")
        return 0
    with open(path, "w") as out:
        out.write(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
