/**
 * What is shown, kept in the page's address: `#section?name=value&…`. A reload or a copied address
 * shows the same; a link that names some values changes those and leaves the others.
 */
const ONCE = new Set(["at", "number"]);
const state = {
  section: "",
  parts: [],
  values: new URLSearchParams(),
  timer: 0,

  /** Take over what a part of the page shows; null is what is shown anyway. */
  set(section, values) {
    if (this.applying) return;
    this.section = section;
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") this.values.delete(name);
      else this.values.set(name, value);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.write(), 120);
  },

  write() {
    const query = this.values.toString();
    history.replaceState(history.state, "", `#${this.section}${query ? `?${query}` : ""}`);
  },

  /** Show what the address says: at first, and whenever a link or the reader changes it. */
  async apply(first) {
    const [section, query] = location.hash.slice(1).split("?"), wanted = new URLSearchParams(query ?? "");
    if (first) {
      this.initial = wanted;
      for (const [name, value] of wanted) if (!ONCE.has(name)) this.values.set(name, value);
    }
    if (first && !query) return;
    this.applying = true;
    try {
      for (const part of this.parts) await part.apply(wanted);
    } finally {
      this.applying = false;
    }
    if (query) for (const part of this.parts) this.set(section, part.values());
    else this.set(section, {});
    this.write();
    const reloaded = first && performance.getEntriesByType("navigation")[0]?.type === "reload";
    if (query && !reloaded) reveal(section);
  },

  /** A part that is ready later than the others. */
  async add(part) {
    this.parts.push(part);
    const query = location.hash.split("?")[1];
    if (query) await part.apply(this.initial);
  },
};

function reveal(id) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  ($(id)?.querySelector(".head") ?? $(id))?.scrollIntoView({ behavior: calm ? "auto" : "smooth" });
}

/** A link to the longest event of a cause, kernel, operator, layer or phase in the timeline. */
const toTimeline = (field, value, words, label) =>
  el("a", { class: "go", href: `#timeline?${new URLSearchParams({ only: `${field}:${value}` })}`, title: "Show in the timeline",
    "aria-label": label ? `Show ${label} in the timeline` : null, onclick: (e) => e.stopPropagation() }, words ?? "↗");
