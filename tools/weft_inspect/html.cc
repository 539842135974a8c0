#include "weft/tools/weft_inspect/html.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"

namespace weft::inspect_tool {
namespace {

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      absl::StrAppend(&out, "\\", std::string(1, c));
    } else if (byte < 0x20 || byte >= 0x7f) {
      absl::StrAppendFormat(&out, "\\u%04x", byte);
    } else {
      out += c;
    }
  }
  return out + "\"";
}

constexpr char kHead[] = R"html(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>weft job</title>
<style>
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #1f2328; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
svg { width: 100%; max-width: 900px; height: auto; border: 1px solid #d1d9e0; border-radius: 6px; }
table { border-collapse: collapse; margin: .3rem 0 1rem; }
th, td { border: 1px solid #d1d9e0; padding: .2rem .6rem; text-align: left; overflow-wrap: anywhere; }
th { background: #f6f8fa; } summary { cursor: pointer; } .soft { color: #59636e; } .bad { color: #b42318; }
</style></head><body>
<script id="data" type="application/json">)html";

constexpr char kTail[] = R"html(</script>
<h1>weft job</h1><p id="about" class="soft"></p><div id="picture"></div>
<p class="soft">A line is a connection; its number counts calls under way, red when one is older than ten seconds.</p>
<h2>Calls under way, oldest first</h2><div id="calls"></div>
<h2>Passes and operations</h2><div id="passes"></div>
<h2>Workers</h2><div id="workers"></div>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
function make(parent, tag, attributes, text) {
  const svg = parent.namespaceURI === SVG || tag === "svg";
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function rows(worker, table) {
  return worker.tables && worker.tables[table] ? worker.tables[table].rows : [];
}
function show(parent, list, none) {
  if (!list.length) { make(parent, "p", {class: "soft"}, none); return; }
  const table = make(parent, "table");
  const head = make(table, "tr");
  const columns = Object.keys(list[0]);
  for (const column of columns) make(head, "th", {}, column);
  for (const row of list) {
    const line = make(table, "tr");
    for (const column of columns) make(line, "td", {}, row[column] ?? "");
  }
}
document.getElementById("about").textContent = `${data.workers.length} workers, ${data.source}, ${data.at}`;

const place = new Map();
data.workers.forEach((worker, i) => {
  const angle = 2 * Math.PI * i / data.workers.length - Math.PI / 2;
  place.set(worker.name, {x: 450 + 330 * Math.cos(angle), y: 300 + 220 * Math.sin(angle), worker});
});
const links = new Map();
for (const worker of data.workers) {
  for (const peer of rows(worker, "peers")) {
    if (!place.has(peer.name)) continue;
    const key = [worker.name, peer.name].sort().join("\n");
    const link = links.get(key) || {open: false, calls: 0, age: 0};
    link.open = link.open || Number(peer.connections) > 0;
    links.set(key, link);
  }
  for (const call of rows(worker, "pending")) {
    const link = links.get([worker.name, call.to].sort().join("\n"));
    if (!link) continue;
    link.calls += 1;
    link.age = Math.max(link.age, Number(call.age_s) || 0);
  }
}
const svg = make(document.getElementById("picture"), "svg", {viewBox: "0 0 900 600", role: "img"});
for (const [key, link] of links) {
  const [a, b] = key.split("\n").map((name) => place.get(name));
  if (a === b || !link.open && !link.calls) continue;
  const colour = link.age > 10 ? "#b42318" : "#8c959f";
  const line = {x1: a.x, y1: a.y, x2: b.x, y2: b.y, stroke: colour, "stroke-width": link.calls ? 2 : 1};
  if (!link.open) line["stroke-dasharray"] = "5 5";
  make(svg, "line", line);
  if (link.calls) {
    // Not in the middle, where lines cross.
    const at = {x: a.x + (b.x - a.x) * 0.4, y: a.y + (b.y - a.y) * 0.4 + 5};
    make(svg, "text", {...at, "text-anchor": "middle", fill: colour, stroke: "#fff", "stroke-width": 5, "paint-order": "stroke"}, link.calls);
  }
}
for (const {x, y, worker} of place.values()) {
  const state = worker.error ? "#fee4e2" : "#ddf4ff";
  make(svg, "rect", {x: x - 62, y: y - 24, width: 124, height: 48, rx: 8, fill: state, stroke: "#57606a"});
  make(svg, "text", {x, y: y - 3, "text-anchor": "middle", "font-weight": 600}, worker.name);
  const own = rows(worker, "worker")[0];
  const words = worker.error ? "no answer" : `${rows(worker, "serving").length} serving, ${rows(worker, "pending").length} pending`;
  make(svg, "text", {x, y: y + 15, "text-anchor": "middle", "font-size": 11}, own && own.state !== "running" ? own.state : words);
}

const calls = [];
const passes = [];
for (const worker of data.workers) {
  for (const call of rows(worker, "pending")) calls.push({at: worker.name, is: `waits for ${call.to}`, method: call.method, age_s: call.age_s, state: call.state});
  for (const call of rows(worker, "serving")) calls.push({at: worker.name, is: `runs for ${call.caller}`, method: call.method, age_s: call.age_s, state: ""});
  for (const pass of rows(worker, "backward_passes")) passes.push({at: worker.name, what: `backward ${pass.pass}`, state: pass.state, age_s: pass.age_s, waits_for: pass.waits_for});
  for (const group of rows(worker, "groups")) passes.push({at: worker.name, what: `group ${group.group}: ${group.doing}`, state: group.state, age_s: group.age_s, waits_for: group.waits_for});
}
calls.sort((a, b) => Number(b.age_s) - Number(a.age_s));
show(document.getElementById("calls"), calls, "None.");
show(document.getElementById("passes"), passes, "None.");
for (const worker of data.workers) {
  const parts = make(document.getElementById("workers"), "details");
  make(parts, "summary", {}, `${worker.name} at ${worker.address}`);
  if (worker.error) make(parts, "p", {class: "bad"}, worker.error);
  for (const [name, table] of Object.entries(worker.tables || {})) {
    make(parts, "h2", {}, name);
    show(parts, table.rows, "Empty.");
    if (table.left_out) make(parts, "p", {class: "soft"}, `${table.left_out} more`);
  }
}
</script></body></html>
)html";

}  // namespace

std::string page(std::string_view source, std::string_view at,
                 const std::vector<SeenWorker>& workers) {
  std::vector<std::string> parts;
  for (const SeenWorker& worker : workers) {
    parts.push_back(absl::StrCat(
        "{\"name\":", json_text(worker.name), ",\"address\":", json_text(worker.address),
        ",\"error\":", json_text(worker.error),
        ",\"tables\":", worker.tables.empty() ? "null" : worker.tables, "}"));
  }
  const std::string data =
      absl::StrCat("{\"source\":", json_text(source), ",\"at\":", json_text(at), ",\"workers\":[",
                   absl::StrJoin(parts, ",\n"), "]}");
  // Within JSON it stands in texts only; unescaped it could end the element that holds the data.
  return absl::StrCat(kHead, absl::StrReplaceAll(data, {{"<", "\\u003c"}}), kTail);
}

}  // namespace weft::inspect_tool
