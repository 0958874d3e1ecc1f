/** Detailed tables: every view that has rows; one is shown, sorted and filtered. */
class Details {
  constructor(views, host) {
    this.views = views;
    this.host = host;
    this.limit = PAGE;
    this.filter = $("details-filter");
    this.filter.addEventListener("input", () => { this.limit = PAGE; this.draw(); });
    this.tabs = views.map((view) =>
      el("button", { type: "button", role: "tab", id: `view-${view.id}`, "aria-controls": "details-table",
        onclick: () => { this.choose(view); this.remember(); }, onkeydown: (e) => this.arrow(e) },
      el("span", {}, view.title), el("em", {}, count(view.total))));
    $("details-picker").append(...this.tabs);
    this.choose(views[0]);
  }

  arrow(event) {
    const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const n = this.tabs.length, next = (this.tabs.indexOf(event.currentTarget) + step + n) % n;
    this.tabs[next].focus();
    this.choose(this.views[next]);
    this.remember();
  }

  remember() { state.set("details", this.values()); }

  values() { return { table: this.view === this.views[0] ? null : this.view.id }; }

  async apply(wanted) {
    const view = this.views.find((v) => v.id === wanted.get("table"));
    if (view) this.choose(view);
  }

  /** To the row's place in the timeline. */
  link(i) {
    const value = (field) => { const c = this.view.columns.find((one) => one.field === field); return c && c.values[i] !== null ? (c.names ? c.names[c.values[i]][0] : c.values[i]) : null; };
    const field = ["kernel", "op", "layer", "cause", "phase"].find((name) => value(name) !== null);
    if (!data.timeline.length) return null;
    if (field) return toTimeline(field, value(field), null, value(field));
    const place = Object.entries({ rank: value("rank"), number: value("step") ?? value("number") }).filter(([, v]) => v !== null);
    return place.length ? el("a", { class: "go", href: `#timeline?${new URLSearchParams(place)}`, title: "Show in the timeline", "aria-label": "Show in the timeline" }, "↗") : null;
  }

  choose(view) {
    this.view = view;
    this.limit = PAGE;
    this.sort = null;
    this.filter.value = "";
    this.tabs.forEach((tab, i) => {
      const on = this.views[i] === view;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
    });
    this.host.setAttribute("aria-labelledby", `view-${view.id}`);
    $("details-doc").replaceChildren(
      ...view.about.map((text) => el("p", {}, ...text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part)))),
    );
    this.draw();
    this.host.scrollLeft = 0;
  }

  /** What a cell says: text for people, and as recorded where that differs. */
  cell(column, i) {
    const value = column.values[i];
    if (value === null) return [DASH, null];
    if (column.names) {
      const [full, shown] = column.names[value];
      return [shown ?? full, full];
    }
    return [(UNITS[column.unit] || plain)(value), null];
  }

  /** Cut the middle out: both ends tell names apart. */
  cut(text, width) {
    const letters = [...text];
    if (letters.length <= width) return text;
    const head = Math.floor(((width - 1) * 3) / 5);
    return `${letters.slice(0, head).join("")}…${letters.slice(head + 1 - width).join("")}`;
  }

  rows() {
    const { columns } = this.view, n = columns[0].values.length;
    const words = this.filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const text = columns.filter((c) => c.names);
    let rows = [...Array(n).keys()];
    if (words.length) {
      rows = rows.filter((i) => {
        const all = text.map((c) => (c.values[i] === null ? "" : c.names[c.values[i]].join(" "))).join(" ").toLowerCase();
        return words.every((word) => all.includes(word));
      });
    }
    if (!this.sort) return rows;
    const { column, sign } = this.sort;
    const key = column.names ? (i) => this.cell(column, i)[0].toLowerCase() : (i) => Number(column.values[i]);
    const [known, unknown] = [rows.filter((i) => column.values[i] !== null), rows.filter((i) => column.values[i] === null)];
    const keys = new Map(known.map((i) => [i, key(i)]));
    known.sort((a, b) => sign * (keys.get(a) < keys.get(b) ? -1 : keys.get(a) > keys.get(b) ? 1 : 0) || a - b);
    return [...known, ...unknown];
  }

  draw() {
    const { columns, total, command } = this.view;
    const rows = this.rows(), shown = rows.slice(0, this.limit), held = columns[0].values.length;
    const head = columns.map((c, i) => {
      const sorted = this.sort?.column === c;
      return el("th", { scope: "col", class: c.names ? "" : "num", title: c.doc,
        "aria-sort": sorted ? (this.sort.sign > 0 ? "ascending" : "descending") : null },
      el("button", { type: "button", "data-column": i, onclick: () => this.order(c, i) }, c.label[0].toUpperCase() + c.label.slice(1)));
    });
    const body = shown.map((i) => el("tr", {}, columns.map((c, at) => {
      const [whole, full] = this.cell(c, i), text = c.names && !c.prose ? this.cut(whole, at ? 34 : 46) : whole;
      const share = c.unit === "ratio" && c.label === "share" && c.values[i] !== null;
      const link = at ? null : this.link(i);
      return el("td", { class: c.prose ? "prose" : c.names ? "words" : text === DASH ? "num dim" : "num", title: full && full !== text ? full : null },
        share ? el("span", { class: "meter small", "aria-hidden": "true" }, el("i", { style: { width: `${Math.min(100 * c.values[i], 100)}%` } })) : null, share ? el("span", {}, text) : text, link);
    })));
    const table = el("table", { class: "detail" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
    this.host.replaceChildren(table);
    if (!rows.length) this.host.append(el("p", { class: "empty" }, "No row matches these words."));
    const foot = [];
    if (rows.length > shown.length) {
      foot.push(`${count(shown.length)} of ${count(rows.length)} rows`,
        el("button", { type: "button", onclick: () => { this.limit += 200; this.draw(); } }, "Show more"));
    }
    if (total > held) foot.push(el("span", {}, `${count(total - held)} more ${total - held === 1 ? "row is" : "rows are"} not on this page. All of them:`));
    foot.push(el("code", { title: "prints every row and column" }, command));
    $("details-foot").replaceChildren(...foot);
  }

  order(column, i) {
    const same = this.sort?.column === column;
    this.sort = { column, sign: same ? -this.sort.sign : column.names ? 1 : -1 };
    this.draw();
    this.host.querySelector(`[data-column="${i}"]`).focus({ preventScroll: true });
  }
}
