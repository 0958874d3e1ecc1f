/** Beside the timeline: what is selected, in full; else the sums of a stretch. */
class Dock {
  constructor(timeline, host) {
    this.timeline = timeline;
    this.host = host;
  }

  show() {
    const { selected, stretch, window: step } = this.timeline;
    if (selected) this.event(selected.i);
    else this.sums(stretch ? stretch[0] : 0, stretch ? stretch[1] : step.dur_ns);
    this.host.scrollTop = 0;
  }

  list(facts) {
    return el("dl", {}, facts.map(([name, ...value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  // ---- one event ----

  event(i) {
    const { pack, kinds, names } = this.timeline, t = this.timeline, k = pack.kind[i], full = names[kinds.name[k]];
    const launch = t.launchOf(i), launched = t.launchedBy(i);
    const causes = t.causesOf(i).map(([label, share, color], n) => [n ? "Then" : "Counts as",
      el("i", { class: "swatch", style: { "--cause": color } }), share === null ? label : `${label} ${percent(share)}`]);
    const goTo = (at, words) => el("button", { type: "button", class: "link", onclick: () => t.around(at, true) }, words);
    const facts = [...t.facts(i), ...causes];
    // Without a recorded device, host spans stand for its events: nothing launched them.
    const itself = launch >= 0 && pack.start[launch] === pack.start[i];
    if (launch >= 0 && !itself) facts.push(["Launched by", goTo(launch, t.title(pack.kind[launch]))], ["Launch delay", duration(pack.start[i] - pack.start[launch])]);
    else if (launch < 0 && t.rowOf(i).type === "device" && pack.launches.length) facts.push(["Launched by", "a call outside this window, or not recorded"]);
    if (launched.length && pack.start[launched[0]] !== pack.start[i]) {
      facts.push(["Launches", goTo(launched[0], t.title(pack.kind[launched[0]])), launched.length > 1 ? ` and ${count(launched.length - 1)} more` : ""],
        ["Launch delay", duration(pack.start[launched[0]] - pack.start[i])]);
    }
    facts.push(...this.variant(i));
    this.host.replaceChildren(
      this.head(t.title(k), el("button", { type: "button", class: "link", onclick: () => t.select(null) }, "Close")),
      full !== t.title(k) ? el("details", {}, el("summary", {}, "Full name"), el("p", { class: "full" }, full)) : null ?? "",
      this.list(facts), this.stack(launch >= 0 ? launch : i), this.alike(i), ...this.others(i));
  }

  head(words, ...buttons) {
    return el("div", { class: "dock-head" }, el("h3", {}, words), ...buttons);
  }

  /** Shapes, grid and the like. */
  variant(i) {
    const { pack, variants, details } = this.timeline, values = variants[pack.kind[i]]?.[pack.variant[i]];
    if (!values || this.timeline.rowOf(i).type !== "device") return [];
    const list = (text) => text.replace(/[[\]" ]/g, "").split(",").filter(Boolean), sizes = (text) => list(text).join(" × ");
    const words = {
      grid: ["Grid", sizes], block: ["Block", sizes], registers_count: ["Registers", (v) => `${v} per thread`],
      shared_memory_bytes: ["Shared memory", bytes], occupancy_ratio: ["Occupancy", percent], bytes_count: ["Bytes", bytes],
      graph_id: ["CUDA graph", String], input_dims: ["Shapes", String], input_types: ["Types", (v) => list(v).join(", ")],
    };
    return details.flatMap((name, n) => (values[n] === null || !words[name] ? [] : [[words[name][0], words[name][1](values[n])]]));
  }

  /** The calls around a host span, the outermost first. */
  stack(i) {
    const t = this.timeline, frames = t.enclosing(i);
    if (frames.length < 2) return "";
    const items = frames.map((at) => el("li", {}, el("button", { type: "button", class: "link", onclick: () => t.around(at, true) }, t.title(t.pack.kind[at]))));
    return el("details", { class: "frames" }, el("summary", {}, `Host stack, ${frames.length} calls`), el("ol", {}, items));
  }

  alike(i) {
    const { pack, kinds } = this.timeline, name = kinds.name[pack.kind[i]], { lo, hi } = this.timeline.familyOf(this.timeline.rowOf(i));
    let n = 0, total = 0, longest = lo;
    for (let j = lo; j < hi; j++) if (kinds.name[pack.kind[j]] === name) { n++; total += pack.dur[j]; if (kinds.name[pack.kind[longest]] !== name || pack.dur[j] > pack.dur[longest]) longest = j; }
    return el("div", {}, el("h4", {}, "All of this name in this window"), this.list([["Runs", count(n)], ["Total", duration(total)], ["Mean", duration(total / n)],
      ["Longest", el("button", { type: "button", class: "link", onclick: () => this.timeline.around(longest, true) }, duration(pack.dur[longest]))]]));
  }

  /** Rows of tables that hold this event. */
  others(i) {
    const { pack, kinds, names } = this.timeline, k = pack.kind[i], links = [];
    if (this.timeline.rowOf(i).type !== "device") return [];
    for (const [level, at] of [["kernel", kinds.name[k]], ["op", kinds.op[k]], ["layer", kinds.layer[k]], ["phase", kinds.phase[k]]]) {
      if (at >= 0) links.push(el("a", { href: `#breakdown?${new URLSearchParams({ by: level, row: names[at] })}` }, { op: "operator" }[level] ?? level));
    }
    return [el("p", { class: "dim rows" }, "In the breakdown: ", ...links.flatMap((a, n) => (n ? [", ", a] : [a])))];
  }

  // ---- a stretch ----

  sums(a, b) {
    const t = this.timeline, whole = !t.stretch, span = Math.max(b - a, 1), { kinds, names, data, pack } = t;
    const spent = new Map(), kernels = new Map();
    for (const row of pack.rows) {
      if (row.type !== "state" && row.type !== "device") continue;
      t.within(row, a, b, (i, time) => {
        const k = pack.kind[i], into = row.type === "state" ? spent : kernels, key = row.type === "state" ? names[kinds.first[k]] : kinds.name[k];
        const sum = into.get(key) || { time: 0, n: 0, longest: i, k };
        sum.time += time; sum.n++;
        if (pack.dur[i] > pack.dur[sum.longest]) sum.longest = i;
        into.set(key, sum);
      });
    }
    const parts = [...spent].sort((x, y) => y[1].time - x[1].time), top = [...kernels.values()].sort((x, y) => y.time - x.time);
    const swatch = (key) => el("i", { class: "swatch", style: { "--cause": data.cause_colors[key] || "#9aa0a8" } });
    const title = whole ? `Whole ${data.unit}` : "Selected stretch";
    const buttons = whole ? [] : [el("button", { type: "button", class: "link", onclick: () => t.range(a, b) }, "Zoom"), el("button", { type: "button", class: "link", onclick: () => t.mark(null) }, "Clear")];
    this.host.replaceChildren(this.head(`${title}: ${duration(b - a)}`, ...buttons),
      whole ? el("p", { class: "dim" }, "Select an event for its shapes, launch and stack, or drag over a stretch for its sums.") : el("p", { class: "dim" }, `${duration(a)} to ${duration(b)} of this window`),
      el("h4", {}, "Device time"), this.table(parts.map(([key, sum]) => [[swatch(key), data.cause_labels[key] || key], duration(sum.time), percent(sum.time / span)]), "device"),
      el("h4", {}, `${count(top.reduce((n, s) => n + s.n, 0))} device events`), this.table(top.slice(0, 12).map((sum) => [
        el("button", { type: "button", class: "link", title: names[kinds.name[sum.k]], onclick: () => t.around(sum.longest) }, t.title(sum.k)), `${count(sum.n)}×`, duration(sum.time)]), "events"),
      top.length > 12 ? el("p", { class: "dim" }, `${count(top.length - 12)} more names: ${duration(top.slice(12).reduce((s, e) => s + e.time, 0))}`) : "",
      ...this.ranks(a, b));
  }

  /** The same stretch on every rank. */
  ranks(a, b) {
    const t = this.timeline, of = t.ranks.filter((r) => r.row);
    if (of.length < 2) return [];
    const rows = of.map((rank) => {
      const spent = { compute: 0, communication: 0, idle: 0 };
      t.within(rank.row, a - rank.shift, b - rank.shift, (i, time) => {
        const key = t.names[t.kinds.first[rank.row.pack.kind[i]]].split(".")[0];
        if (key in spent) spent[key] += time;
      });
      return [rank.label, ...["compute", "communication", "idle"].map((key) => percent(spent[key] / Math.max(b - a, 1)))];
    });
    return [el("h4", {}, "By rank"), this.table([["", "compute", "comm.", "idle"], ...rows], "ranks")];
  }

  table(rows, name) {
    return el("table", { class: `sums ${name}` }, el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, n) => el("td", { class: n ? "num" : "" }, cell))))));
  }
}
