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
        onclick: () => this.choose(view), onkeydown: (e) => this.arrow(e) },
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
    $("details-doc").replaceChildren(...view.about.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part)));
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
      return el("td", { class: c.prose ? "prose" : c.names ? "words" : text === DASH ? "num dim" : "num", title: full && full !== text ? full : null },
        share ? el("span", { class: "meter small", "aria-hidden": "true" }, el("i", { style: { width: `${Math.min(100 * c.values[i], 100)}%` } })) : null, share ? el("span", {}, text) : text);
    })));
    const table = el("table", { class: "detail" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
    this.host.replaceChildren(table);
    if (!rows.length) this.host.append(el("p", { class: "empty" }, "No row matches these words."));
    const foot = [];
    if (rows.length > shown.length) {
      foot.push(`${count(shown.length)} of ${count(rows.length)} rows`,
        el("button", { type: "button", onclick: () => { this.limit += 200; this.draw(); } }, "Show more"));
    }
    if (total > held) foot.push(el("span", {}, `${count(total - held)} more ${total - held === 1 ? "row is" : "rows are"} not in this page. All of them:`));
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
