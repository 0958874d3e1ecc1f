/** The breakdown: one table per level, sorted, filtered, each row a stack of causes. */
const PAGE = 50;

class Breakdown {
  constructor(data, host, tabs, filter) {
    this.data = data;
    this.host = host;
    this.filter = filter;
    this.level = data.levels[0];
    this.sort = null;
    this.limit = PAGE;
    this.open = new Set();
    this.tabs = data.levels.map((level) =>
      el("button", { type: "button", role: "tab", id: `tab-${level.id}`, "aria-controls": "breakdown-table",
        onclick: () => { this.choose(level); this.remember(); }, onkeydown: (e) => this.arrow(e) }, level.label));
    tabs.append(...this.tabs);
    filter.addEventListener("input", () => { this.limit = PAGE; this.draw(); });
    this.choose(this.level);
  }

  arrow(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const n = this.tabs.length, next = (this.tabs.indexOf(event.currentTarget) + step + n) % n;
    this.tabs[next].focus();
    this.choose(this.data.levels[next]);
    this.remember();
  }

  remember() { state.set("breakdown", this.values()); }

  values() {
    const [open] = this.open;
    return { by: this.level === this.data.levels[0] ? null : this.level.id, row: open ? open.full : null };
  }

  async apply(wanted) {
    const level = this.data.levels.find((l) => l.id === wanted.get("by"));
    if (level) this.choose(level);
    const row = wanted.has("row") && this.level.rows.find((r) => r.full === wanted.get("row"));
    if (!row) return;
    this.filter.value = "";
    this.open.add(row);
    this.limit = Math.max(this.limit, this.rows().indexOf(row) + 1);
    this.draw();
  }

  choose(level) {
    this.level = level;
    this.sort = level.ordered ? { column: "key", sign: 1 } : { column: "time", sign: -1 };
    this.limit = PAGE;
    this.open.clear();
    this.tabs.forEach((tab, i) => {
      const on = this.data.levels[i] === level;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    });
    this.host.setAttribute("aria-labelledby", `tab-${level.id}`);
    this.draw();
  }

  columns() {
    const unit = this.data.unit, level = this.level;
    const all = [
      { id: "key", label: level.label, width: level.ordered ? "14%" : "30%", value: (r) => r.order ?? r.shown.toLowerCase() },
      { id: "time", label: level.id === "step" ? "Time" : `Per ${unit}`, num: true, width: "9%", value: (r) => r.time / r.per },
      { id: "share", label: "Share", num: true, width: "8%", value: (r) => r.time },
    ];
    if (level.calls) {
      all.push({ id: "own", label: "Own time", hint: level.own_time, num: true, width: "9%", value: (r) => r.own });
      all.push({ id: "calls", label: `Runs / ${unit}`, num: true, width: "10%", value: (r) => r.calls ?? -1 });
      all.push({ id: "mean", label: "Mean run", num: true, width: "9%", value: (r) => (r.calls ? r.own / r.calls : -1) });
    }
    all.push({ id: "stack", label: "By cause", value: (r) => r.time });
    return all;
  }

  rows() {
    const words = this.filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const column = this.columns().find((c) => c.id === this.sort.column) || this.columns()[1];
    return this.level.rows
      .filter((r) => words.every((w) => r.search.includes(w)))
      .map((r) => [column.value(r), r])
      .sort((a, b) => this.sort.sign * (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) || b[1].time - a[1].time)
      .map((pair) => pair[1]);
  }

  draw() {
    const columns = this.columns(), rows = this.rows(), shown = rows.slice(0, this.limit);
    const head = columns.map((c) => {
      const sorted = this.sort.column === c.id;
      return el("th", { scope: "col", title: c.hint ?? null, class: c.num ? "num" : "", style: c.width ? { width: c.width } : {},
        "aria-sort": sorted ? (this.sort.sign > 0 ? "ascending" : "descending") : null },
      el("button", { type: "button", "data-column": c.id, onclick: () => this.order(c) }, c.label));
    });
    const longest = Math.max(...this.level.rows.map((r) => r.time / r.per), 1e-9);
    const body = shown.flatMap((row) => this.row(row, columns, longest));
    const table = el("table", { class: "grid" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
    const parts = [table];
    if (!rows.length) parts.push(el("p", { class: "empty" }, "No row matches this name."));
    const hidden = rows.length - shown.length, cut = this.level.cut;
    if (hidden > 0 || cut) {
      const foot = el("div", { class: "grid-foot" });
      if (hidden > 0) {
        foot.append(`${count(shown.length)} of ${count(rows.length)} rows`,
          el("button", { type: "button", onclick: () => { this.limit += 500; this.draw(); } }, "Show more"));
      }
      if (cut) foot.append(cut);
      parts.push(foot);
    }
    this.host.replaceChildren(...parts);
  }

  order(column) {
    const same = this.sort.column === column.id;
    this.sort = { column: column.id, sign: same ? -this.sort.sign : column.id === "key" ? 1 : -1 };
    this.draw();
    this.host.querySelector(`[data-column="${column.id}"]`).focus();
  }

  row(row, columns, longest) {
    const opened = this.open.has(row);
    const toggle = () => {
      if (!this.open.delete(row)) this.open.add(row);
      this.draw();
      this.remember();
      this.host.querySelector(`[data-row="${this.level.rows.indexOf(row)}"]`).focus({ preventScroll: true });
    };
    const cells = {
      key: () => el("td", { class: "name", title: row.full },
        el("button", { type: "button", "aria-expanded": String(opened), class: row.none ? "none" : null,
          "data-row": this.level.rows.indexOf(row), onclick: (e) => { e.stopPropagation(); toggle(); } }, row.shown)),
      time: () => el("td", { class: "num" }, duration(row.time / row.per)),
      share: () => el("td", { class: "num" }, percent(row.time / this.data.observed_ns)),
      own: () => el("td", { class: "num" }, duration(row.own / this.data.windows)),
      calls: () => el("td", { class: "num" }, row.calls === null ? DASH : this.calls(row.calls / this.data.windows)),
      mean: () => el("td", { class: "num" }, row.calls ? duration(row.own / row.calls) : DASH),
      stack: () => el("td", {}, this.stack(row, longest)),
    };
    const out = [el("tr", { class: "row", onclick: toggle }, columns.map((c) => cells[c.id]()))];
    if (opened) out.push(el("tr", { class: "more-row" }, el("td", { colspan: columns.length }, this.detail(row))));
    return out;
  }

  calls(n) { return n >= 9.95 || Number.isInteger(n) ? count(n) : n.toFixed(1); }

  stack(row, longest) {
    const width = (100 * row.time) / row.per / longest;
    // Too short to be cut into causes: the largest one's colour.
    const parts = width < 3 && row.causes.length ? [row.causes.reduce((a, b) => (b[1] > a[1] ? b : a))] : row.causes;
    return el("div", { class: "stack", style: { width: `${Math.max(width, 0.6)}%` }, "aria-hidden": "true" },
      parts.map(([i, t]) => {
        const cause = this.data.causes[i];
        return el("i", { style: { flex: `${t} 1 0`, background: cause.color }, title: `${cause.label}: ${duration(t / row.per)}` });
      }));
  }

  /** To the row's place in the timeline. */
  link(row) {
    const { id } = this.level, words = "Show in the timeline ↗";
    if (!this.data.timeline.length || row.none) return null;
    if (id === "step" || id === "rank") {
      const query = id === "step" ? { number: row.full } : { rank: row.full };
      return el("p", { class: "links" }, el("a", { href: `#timeline?${new URLSearchParams(query)}` }, words));
    }
    return el("p", { class: "links" }, toTimeline(id, row.full, words));
  }

  detail(row) {
    const list = [...row.causes].sort((a, b) => b[1] - a[1]).map(([i, t]) => {
      const cause = this.data.causes[i];
      return el("li", {}, el("i", { class: "swatch", style: { "--cause": cause.color } }), el("span", {}, cause.label),
        el("b", {}, duration(t / row.per)), el("em", {}, percent(t / row.time)));
    });
    return [this.link(row), row.full !== row.shown ? el("p", { class: "full" }, row.full) : null, el("ul", { class: "causes" }, list)];
  }
}
