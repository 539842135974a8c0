// The first 30 entries of index.js that have all words of the text, names that begin with it first.
const input = document.getElementById("search");
const found = document.getElementById("found");
const root = document.body.dataset.root;

function rank(text, words) {
  const name = text.split("::").pop();
  if (name === words) return 0;
  if (name.startsWith(words)) return 1;
  return text.startsWith(words) ? 2 : 3;
}

function search() {
  const words = input.value.trim().toLowerCase();
  found.replaceChildren();
  if (!words) return;
  const parts = words.split(/\s+/);
  const hits = entries.map(([text, where]) => [text.toLowerCase(), text, where])
    .filter(([lower]) => parts.every((part) => lower.includes(part)))
    .sort((a, b) => rank(a[0], words) - rank(b[0], words) || a[0].length - b[0].length)
    .slice(0, 30);
  for (const [, text, where] of hits) {
    const link = document.createElement("a");
    link.href = `${root}/${where}`;
    link.textContent = text.replace(/^weft::/, "");
    const item = document.createElement("li");
    item.append(link);
    found.append(item);
  }
}

input.addEventListener("input", search);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== input) {
    event.preventDefault();
    input.focus();
  }
});
