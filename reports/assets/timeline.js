/**
 * The timeline of one step: rows of events that do not overlap, drawn on a canvas.
 *
 * What is narrower than a pixel is drawn as one column whose opacity is the share of that pixel
 * that events cover (from running sums, so exactly), in the colour of the longest of them. The
 * cost of a frame depends on its width, not on the number of events.
 */
const HEIGHTS = { rank: 18, path: 20, phase: 20, layer: 20, state: 24, device: 22, host: 17, clock: 20, telemetry: 58 };
const GROUP_GAP = 7, RULER = 26, MINI = 34, MIN_SPAN_NS = 40;
const NAME_COLORS = ["#3b7dd8", "#12a17d", "#e07b1a", "#c05a9c", "#c9a227", "#6a5acd", "#3d9fc9", "#d1491b", "#7d7768", "#8fae3c"];
const HOST_COLORS = { annotation: "#7d8aa5", cpu_op: "#9db2cf", runtime: "#d9a15f", driver: "#d9a15f", sync: "#c46a3b", python: "#b9c4b0", gc: "#8a8f3c", overhead: "#a7a7a7" };

const lowerBound = (a, v, lo, hi) => {
  while (lo < hi) { const m = (lo + hi) >> 1; if (a[m] < v) lo = m + 1; else hi = m; }
  return lo;
};

class Timeline {
  constructor(data) {
    this.data = data;
    this.windows = data.timeline;
    this.mode = "cause";
    this.onPath = false;
    this.packs = new Map();
    this.expanded = new Map();
    this.query = "";
    this.only = null;
    this.selected = null;
    this.stretch = null;
    this.hover = null;
    this.ranks = [];
    this.dock = new Dock(this, $("tl-detail"));
    this.body = $("tl-body");
    this.gutter = el("div", { class: "tl-gutter" });
    this.mini = el("canvas", { class: "tl-mini", "aria-hidden": "true" });
    this.canvas = el("canvas", { class: "tl-canvas", role: "img", "aria-label": "Timeline of events; arrow keys move, plus and minus zoom, 0 shows all" });
    this.hint = el("div", { class: "tl-hint", "aria-hidden": "true" }, "Click the timeline, or hold Ctrl, to zoom with the wheel");
    this.view = el("div", { class: "tl-view" }, this.mini, this.canvas, this.hint);
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", "Timeline");
    this.body.append(this.gutter, this.view);
    this.fillSelectors();
    this.listen();
  }

  async start() {
    const names = JSON.parse(await inflateText("names"));
    this.names = names.names;
    this.short = names.short;
    this.kinds = names.kinds;
    this.variants = names.variants;
    this.details = names.details;
    this.telemetry = await unpack("series");
    for (const [i, one] of this.telemetry.meta.series.entries()) {
      const delta = this.telemetry.arrays[`t${i}`], time = new Float64Array(delta.length);
      let t = 0;
      for (let k = 0; k < delta.length; k++) time[k] = (t += delta[k]) * 1000;
      one.time = time;
      one.value = this.telemetry.arrays[`v${i}`];
      one.origin = BigInt(one.start_ns);
    }
    await this.show(this.windows.reduce((a, w) => (w.dur_ns > a.dur_ns ? w : a), this.windows[0]));
    new ResizeObserver(() => this.resize()).observe(this.view);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.colors = null; this.draw(); });
  }

  // ---- the page's address ----

  remember() { state.set("timeline", this.values()); }

  values() {
    const { window: step, t0, t1, stretch } = this, span = (a, b) => `${Math.round(a)}-${Math.round(b)}`;
    return {
      rank: step.rank, step: step.index, view: t1 - t0 < step.dur_ns ? span(t0, t1) : null, stretch: stretch && span(...stretch),
      event: this.selected?.i, colour: this.mode === "cause" ? null : this.mode, find: this.query.trim(), only: this.only && `${this.only.field}:${this.only.value}`,
      path: this.onPath ? 1 : null,
    };
  }

  async apply(wanted) {
    const number = (name) => (/^\d{1,19}$/.test(wanted.get(name) ?? "") ? Number(wanted.get(name)) : null);
    const span = (name) => { const m = /^(\d{1,15})-(\d{1,15})$/.exec(wanted.get(name) ?? ""); return m && Number(m[1]) < Number(m[2]) ? [Number(m[1]), Number(m[2])] : null; };
    const rank = number("rank") ?? this.window.rank, named = this.windows.filter((w) => w.rank === rank);
    const at = /^\d{1,19}$/.test(wanted.get("at") ?? "") ? BigInt(wanted.get("at")) : null;
    let target = this.window;
    if (at !== null) target = named.find((w) => at >= BigInt(w.start_ns) && at < BigInt(w.start_ns) + BigInt(w.dur_ns)) ?? named[0] ?? target;
    else if (wanted.has("number")) target = named.find((w) => w.step === number("number")) ?? target;
    else if (wanted.has("rank") || wanted.has("step")) target = this.nearest(named, number("step") ?? target.index) ?? target;
    if (target !== this.window) await this.show(target);
    if (wanted.has("colour")) { $("tl-color").value = wanted.get("colour"); this.recolour($("tl-color").value || "cause"); }
    if (wanted.has("path") && !this.onPath) this.togglePath();
    if (wanted.has("find")) { $("tl-search").value = wanted.get("find"); this.search(wanted.get("find")); }
    if (wanted.has("only") || at !== null) this.keepOnly(wanted.get("only"));
    if (span("view")) this.range(...span("view"));
    if (span("stretch")?.[0] < this.window.dur_ns) this.mark(span("stretch"));
    const event = number("event");
    if (event !== null && event < this.pack.kind.length) this.select(this.markOf(event));
    else if (at !== null) this.goTo(at - BigInt(target.start_ns));
    else if (this.only && wanted.has("only") && !span("view") && !span("stretch")) await this.longest();
  }

  nearest(windows, index) {
    return windows.reduce((a, w) => (a === null || Math.abs(w.index - index) < Math.abs(a.index - index) ? w : a), null);
  }

  /** The device event that starts at a moment of this window. */
  goTo(moment) {
    const t = Number(moment);
    for (const row of this.pack.rows) {
      if (row.type !== "device") continue;
      const i = lowerBound(this.pack.start, t, row.lo, row.hi);
      if (i < row.hi && this.pack.start[i] === t) { this.around(i); return; }
    }
    this.range(t - this.window.dur_ns / 40, t + this.window.dur_ns / 40);
  }

  // ---- choosing ----

  fillSelectors() {
    const ranks = [...new Set(this.windows.map((w) => w.rank))];
    $("tl-rank").append(...ranks.map((r) => el("option", { value: r }, this.data.rank_labels[r] ?? `rank ${r}`)));
    if (ranks.length < 2) $("tl-rank").closest("label").hidden = true;
    $("tl-rank").addEventListener("change", () => this.pick(Number($("tl-rank").value), this.window?.index));
    $("tl-step").addEventListener("change", () => this.show(this.windows[Number($("tl-step").value)]).then(() => this.remember()));
    $("tl-color").addEventListener("change", (e) => { this.recolour(e.target.value); this.remember(); });
  }

  /** The window of a rank nearest to a step that is embedded. */
  pick(rank, index) {
    const best = this.nearest(this.windows.filter((w) => w.rank === rank), index);
    return best && this.show(best).then(() => this.remember());
  }

  recolour(mode) {
    this.mode = mode;
    this.colors = null;
    this.legend();
    this.draw();
  }

  async show(window) {
    this.window = window;
    const mine = this.windows.map((w, i) => [w, i]).filter(([w]) => w.rank === window.rank);
    const slowest = Math.max(...mine.map(([w]) => w.dur_ns));
    $("tl-rank").value = String(window.rank);
    $("tl-step").replaceChildren(...mine.map(([w, i]) =>
      el("option", { value: i, selected: w === window }, `${w.step ?? "whole trace"} · ${duration(w.dur_ns)}${w.dur_ns === slowest && mine.length > 1 ? " · slowest" : ""}`)));
    this.pack = await this.load(window);
    this.selected = this.hover = this.stretch = null;
    this.t0 = 0;
    this.t1 = window.dur_ns;
    this.colors = null;
    this.ranks = this.aligned(window);
    this.layout();
    this.dock.show();
    this.search(this.query);
    this.legend();
    this.resize();
  }

  /** All ranks' windows of this step, on the clock of this one; without a common clock, by their start. */
  aligned(window) {
    const ranks = this.windows.filter((w) => w.index === window.index);
    if (ranks.length < 2) return [];
    const moment = (w) => BigInt(w.start_ns) - BigInt(w.offset_ns);
    const rows = ranks.map((w) => {
      const lead = Number(moment(w) - moment(window));
      return { window: w, label: this.data.rank_labels[w.rank] ?? `rank ${w.rank}`, shift: Math.abs(lead) < window.dur_ns ? lead : 0, row: null };
    });
    this.ranksLoaded = (async () => {
      for (const one of rows) {
        const pack = await this.load(one.window);
        one.row = pack.rows.find((r) => r.type === "state") ?? null;
        if (this.ranks !== rows) return;
      }
      this.layout();
      this.resize();
      if (!this.selected) this.dock.show();
    })();
    return rows;
  }

  async load(window) {
    if (!this.packs.has(window.id)) {
      this.packs.set(window.id, (async () => {
        const { meta, arrays } = await unpack(window.id);
        const n = arrays.start.length, start = new Float64Array(n), end = new Float64Array(n), sum = new Float64Array(n + 1);
        let i = 0;
        for (const row of meta.rows) {
          row.lo = i;
          let t = 0;
          for (const stop = i + row.n; i < stop; i++) { t += arrays.start[i]; start[i] = t; end[i] = t + arrays.dur[i]; }
          row.hi = i;
        }
        for (i = 0; i < n; i++) sum[i + 1] = sum[i] + arrays.dur[i];
        const path = arrays.path, onPath = new Uint32Array(n + 1);
        for (i = 0; i < n; i++) onPath[i + 1] = onPath[i] + path[i];
        const launch = new Int32Array(n), launches = [];
        for (let number = i = 0; i < n; i++) launch[i] = number += arrays.launch[i];
        for (const row of meta.rows) if (row.type === "host") for (i = row.lo; i < row.hi; i++) if (arrays.share[i]) launches.push(i);
        launches.sort((a, b) => start[a] - start[b] || a - b);
        const pack = { rows: meta.rows, start, end, sum, dur: arrays.dur, kind: arrays.kind, share: arrays.share, path, onPath, launch, launches, variant: arrays.variant };
        for (const row of meta.rows) row.pack = pack;
        return pack;
      })());
    }
    return this.packs.get(window.id);
  }

  // ---- layout ----

  layout() {
    const groups = [];
    for (const row of this.pack.rows) {
      const last = groups[groups.length - 1];
      if (last && last.label === row.group && last.type === row.type) last.rows.push(row);
      else groups.push({ label: row.group, type: row.type, note: row.note, rows: [row] });
    }
    let hosts = 0;
    for (const group of groups) {
      if (group.type !== "host") continue;
      group.key = group.label;
      if (!this.expanded.has(group.key)) this.expanded.set(group.key, hosts === 0);
      hosts++;
    }
    this.lanes = [];
    let y = RULER;
    const labels = [];
    let type = null;
    for (const rank of this.ranks) {
      labels.push({ rank, y, h: HEIGHTS.rank, first: HEIGHTS.rank });
      if (rank.row) this.lanes.push({ row: rank.row, y, h: HEIGHTS.rank - 3, type: "rank", rank, shift: rank.shift });
      y += HEIGHTS.rank;
      type = "rank";
    }
    for (const group of groups) {
      if (type !== null && (type !== group.type || group.type === "host")) y += GROUP_GAP;
      type = group.type;
      const open = group.type !== "host" || this.expanded.get(group.key);
      const rows = open ? group.rows : group.rows.slice(0, 1), h = HEIGHTS[group.type];
      labels.push({ group, y, h: rows.length * h, first: h });
      for (const row of rows) { this.lanes.push({ row, y, h: h - 2, type: group.type }); y += h; }
    }
    this.strips = this.stripList();
    if (this.strips.length) y += GROUP_GAP;
    for (const strip of this.strips) { strip.y = y; strip.h = HEIGHTS.telemetry - 6; labels.push({ strip, y, h: HEIGHTS.telemetry, first: 20 }); y += HEIGHTS.telemetry; }
    this.height = y + 10;
    this.gutter.replaceChildren(...labels.map((l) => this.label(l)));
    this.gutter.style.height = `${this.height + MINI}px`;
  }

  label({ group, strip, rank, y, h, first }) {
    if (rank) {
      const current = rank.window === this.window;
      return el("button", { type: "button", class: "of-rank", style: { top: `${y + MINI}px`, height: `${h}px` }, "aria-pressed": String(current), title: `Show ${rank.label}`,
        onclick: () => this.turnTo(rank) }, el("span", {}, rank.label), el("small", {}, duration(rank.window.dur_ns)));
    }
    const place = { top: `${y + MINI}px`, height: `${group && group.rows.length > 1 && group.type === "host" ? first : Math.max(first, Math.min(h, 22))}px` };
    if (strip) return el("div", { style: place, title: strip.panel }, el("span", {}, strip.panel));
    const words = [el("span", {}, group.label), group.note && group.type === "device" ? el("small", {}, group.note) : null];
    if (group.type === "host" && group.rows.length > 1) {
      const open = this.expanded.get(group.key);
      return el("button", { type: "button", style: place, "aria-expanded": String(open), title: `${group.label}: ${group.rows.length} levels`,
        onclick: () => { this.expanded.set(group.key, !open); this.layout(); this.resize(); } }, words);
    }
    return el("div", { style: place, title: group.label }, words);
  }

  stripList() {
    const origin = BigInt(this.window.start_ns), panels = new Map();
    for (const one of this.telemetry.meta.series) {
      if (one.rank !== null && one.rank !== this.window.rank) continue;
      const shift = Number(one.origin - origin);
      const lo = Math.max(lowerBound(one.time, -shift, 0, one.time.length) - 1, 0);
      const hi = Math.min(lowerBound(one.time, this.window.dur_ns - shift, 0, one.time.length) + 1, one.time.length);
      if (hi - lo < 2) continue;
      if (!panels.has(one.panel)) panels.set(one.panel, { panel: one.panel, unit: one.unit, series: [], max: 0, min: Infinity });
      const panel = panels.get(one.panel);
      for (let i = lo; i < hi; i++) if (!Number.isNaN(one.value[i])) { panel.max = Math.max(panel.max, one.value[i]); panel.min = Math.min(panel.min, one.value[i]); }
      panel.series.push({ ...one, shift, lo, hi });
    }
    for (const panel of panels.values()) {
      if (panel.unit === "ratio" && panel.max <= 1) panel.max = 1;
      // Memory that hardly moves would be a flat line at the top: show its range instead.
      const moving = panel.unit === "bytes" || panel.unit === "hz" || panel.unit === "c" || panel.unit === "w";
      panel.base = moving && panel.min > 0.5 * panel.max && panel.max > panel.min ? panel.min : Math.min(panel.min, 0);
      if (panel.max === panel.base) panel.max = panel.base + (panel.base || 1);
    }
    return [...panels.values()];
  }

  resize() {
    if (!this.pack) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.view.clientWidth;
    if (!this.width) return;
    for (const [canvas, height] of [[this.canvas, this.height], [this.mini, MINI]]) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.drawMini();
    this.paint();
  }

  // ---- colours ----

  palette() {
    if (this.colors) return this.colors;
    const { kinds, data } = this, n = kinds.name.length;
    const cause = (i) => (i < 0 ? null : data.cause_colors[this.names[i]] || null);
    const colors = new Array(n), faint = new Uint8Array(n), band = css("--band");
    for (let k = 0; k < n; k++) {
      const category = this.names[kinds.category[k]], name = this.names[kinds.name[k]];
      const phase = kinds.phase[k] < 0 ? null : this.names[kinds.phase[k]];
      if (category === "phase" && this.mode === "phase") colors[k] = data.phase_colors[name] || data.phase_colors.other;
      else if (category === "phase" || category === "layer") colors[k] = band;
      else if (category === "path") colors[k] = cause(kinds.first[k]) || band;
      else if (category === "state") colors[k] = cause(kinds.first[k]);
      else if (category in HOST_COLORS) colors[k] = HOST_COLORS[category];
      else if (this.mode === "phase") colors[k] = data.phase_colors[phase] || data.phase_colors.other;
      else if (this.mode === "name") colors[k] = NAME_COLORS[this.hash(name)];
      else if (kinds.first[k] >= 0) colors[k] = cause(kinds.first[k]);
      else { colors[k] = data.cause_colors[category] || "#9aa0a8"; faint[k] = 1; }
      colors[k] ||= "#9aa0a8";
    }
    this.colors = { colors, faint, text: css("--text"), soft: css("--text-2"), dim: css("--text-3"), line: css("--line"), grid: css("--line-2"), bg: css("--card"), accent: css("--accent"), shade: css("--shade") };
    return this.colors;
  }

  hash(text) {
    let h = 7;
    for (let i = 0; i < text.length; i++) h = (h * 31 + text.charCodeAt(i)) >>> 0;
    return h % NAME_COLORS.length;
  }

  legend() {
    const { pack, kinds, data } = this, spent = new Map();
    if (this.onPath) { this.pathLegend(); return; }
    for (const row of pack.rows) {
      if (row.type !== "state" && row.type !== "device") continue;
      for (let i = row.lo; i < row.hi; i++) {
        const k = pack.kind[i];
        const key = this.mode === "phase" ? (row.type === "device" ? this.names[kinds.phase[k]] : null) : this.mode === "cause" && kinds.first[k] >= 0 ? this.names[kinds.first[k]] : null;
        if (key) spent.set(key, (spent.get(key) || 0) + pack.dur[i]);
      }
    }
    const items = [...spent].sort((a, b) => b[1] - a[1]).slice(0, 14).map(([key]) =>
      el("li", {}, el("i", { style: { background: this.mode === "phase" ? data.phase_colors[key] || data.phase_colors.other : data.cause_colors[key] } }),
        this.mode === "phase" ? key : data.cause_labels[key] || key));
    if (this.mode === "cause") items.push(el("li", {}, el("i", { style: { background: "#8a8f98", opacity: 0.4 } }), "pale: hidden, costs no time"));
    $("tl-legend").replaceChildren(...items);
  }

  /** What the critical path consists of in this window: causes by their share of it. */
  pathLegend() {
    const { pack, kinds, names, data } = this, spent = new Map();
    let total = 0;
    for (const row of pack.rows) {
      if (row.type !== "path") continue;
      for (let i = row.lo; i < row.hi; i++) {
        const first = kinds.first[pack.kind[i]], key = first < 0 ? null : names[first];
        spent.set(key, (spent.get(key) || 0) + pack.dur[i]);
        total += pack.dur[i];
      }
    }
    const words = (key, time) => `${key === null ? "on other ranks" : data.cause_labels[key] || key} ${percent(time / total)}`;
    const items = [...spent].sort((a, b) => b[1] - a[1]).slice(0, 14).map(([key, time]) =>
      el("li", {}, el("i", { style: { background: key === null ? css("--band") : data.cause_colors[key] || "#9aa0a8" } }), words(key, time)));
    items.unshift(el("li", {}, el("i", { class: "on-path" }), "underlined: on the critical path"));
    $("tl-legend").replaceChildren(...items);
  }

  togglePath() {
    if (!this.data.timeline_path) return;
    this.onPath = !this.onPath;
    $("tl-path").setAttribute("aria-pressed", String(this.onPath));
    this.legend();
    this.remember();
    this.draw();
  }

  // ---- drawing ----

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); });
  }

  paint() {
    if (!this.pack || !this.width) return;
    const g = this.canvas.getContext("2d"), p = this.palette();
    g.clearRect(0, 0, this.width, this.height);
    this.ruler(g, p);
    for (const lane of this.lanes) this.lane(g, p, lane);
    for (const strip of this.strips) this.strip(g, p, strip);
    this.marks(g, p);
    this.drawMini();
  }

  x(t) { return ((t - this.t0) * this.width) / (this.t1 - this.t0); }
  t(x) { return this.t0 + (x * (this.t1 - this.t0)) / this.width; }

  ticks() {
    const target = (this.t1 - this.t0) / Math.max(2, this.width / 110);
    const power = 10 ** Math.floor(Math.log10(target));
    const step = [1, 2, 5, 10].map((m) => m * power).find((v) => v >= target);
    return { step, first: Math.ceil(this.t0 / step) * step };
  }

  ruler(g, p) {
    const { step, first } = this.ticks();
    g.font = `11px ${css("--sans")}`;
    g.textBaseline = "middle";
    // The unit of the step, with as many digits as tell neighbours apart.
    const [unit, size] = step >= 1e9 ? ["s", 1e9] : step >= 1e4 ? ["ms", 1e6] : ["µs", 1e3];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
    for (let t = first; t <= this.t1; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      g.strokeStyle = p.grid;
      g.beginPath(); g.moveTo(x, RULER - 6); g.lineTo(x, this.height); g.stroke();
      const label = `${(t / size).toFixed(digits)} ${unit}`;
      g.fillStyle = p.dim;
      if (x + 8 + label.length * 6.4 < this.width) g.fillText(label, x + 4, 12);
    }
  }

  lane(g, p, { row, y, h, type, shift = 0 }) {
    const { start, end, sum, kind, dur, path, onPath } = row.pack, scale = this.width / (this.t1 - this.t0);
    const matches = this.matches, searching = matches !== null && row.pack === this.pack && type !== "rank" && type !== "mini", t0 = this.t0 - shift, t1 = this.t1 - shift;
    const marking = this.onPath && (type === "device" || type === "host");
    const underline = (x, wide) => { g.globalAlpha = 1; g.fillStyle = p.accent; g.fillRect(x, y + h - 3, wide, 3); };
    g.font = `${type === "host" ? 10.5 : 11}px ${css("--sans")}`;
    g.textBaseline = "middle";
    let i = lowerBound(start, t0, row.lo, row.hi);
    if (i > row.lo && end[i - 1] > t0) i--;
    while (i < row.hi && start[i] < t1) {
      const x0 = (start[i] - t0) * scale, x1 = (end[i] - t0) * scale;
      if (x1 - x0 >= 1) {
        const left = Math.max(x0, -2), right = Math.min(x1, this.width + 2), wide = right - left;
        const k = kind[i], hit = searching && matches.kinds[k];
        const off = marking && !path[i];
        g.globalAlpha = (p.faint[k] ? 0.38 : 1) * ((searching && !hit) || off ? 0.16 : 1);
        g.fillStyle = p.colors[k];
        g.fillRect(left, y, wide > 3 ? wide - 0.75 : wide, h);
        if (wide > 34 && type !== "mini" && type !== "rank") this.text(g, k, left, y, wide, h, type, p.faint[k] || (searching && !hit) || off);
        if (marking && !off) underline(left, wide > 3 ? wide - 0.75 : wide);
        i++;
        continue;
      }
      // A pixel's worth of short events: one column, as opaque as they cover it.
      const column = Math.floor(x0), stop = t0 + (column + 1) / scale;
      let j = Math.max(lowerBound(start, stop, i + 1, row.hi), i + 1);
      if (j - 1 > i && end[j - 1] > stop) j--; // begins in this pixel, ends elsewhere: drawn by itself
      const covered = Math.min(1, (sum[j] - sum[i]) * scale);
      let longest = i;
      const stride = Math.max(1, Math.floor((j - i) / 16));
      for (let m = i; m < j; m += stride) if (dur[m] > dur[longest]) longest = m;
      const hit = searching && matches.prefix[j] - matches.prefix[i] > 0;
      const on = marking && onPath[j] > onPath[i];
      g.globalAlpha = Math.max(0.22, covered) * ((searching && !hit) || (marking && !on) ? 0.16 : 1);
      g.fillStyle = hit ? p.accent : p.colors[kind[longest]];
      g.fillRect(column, y, 1, h);
      if (on) underline(column, 1);
      i = j;
    }
    g.globalAlpha = 1;
  }

  text(g, k, left, y, wide, h, type, faint) {
    const from = Math.max(left, 0), room = wide - (from - left) - 8;
    if (room < 22) return;
    let words = this.title(k);
    const fits = Math.floor(room / 5.7);
    if (words.length > fits) words = fits < 4 ? "" : words.slice(0, fits - 1) + "…";
    if (!words) return;
    g.globalAlpha = faint ? 0.7 : 1;
    g.fillStyle = this.ink(this.colors.colors[k], faint);
    g.fillText(words, from + 4, y + h / 2 + 0.5);
  }

  /** Black or white, whichever reads better on a colour. */
  ink(color, faint) {
    if (faint) return this.colors.text;
    this.inks ||= new Map();
    if (!this.inks.has(color)) {
      const n = parseInt(color.slice(1), 16);
      const [r, g, b] = [n >> 16, (n >> 8) & 255, n & 255].map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
      this.inks.set(color, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff");
    }
    return this.inks.get(color);
  }

  title(k) {
    const i = this.kinds.name[k];
    return this.short[i] ?? this.names[i];
  }

  strip(g, p, strip) {
    const { y, h } = strip, range = strip.max - strip.base;
    g.strokeStyle = p.line;
    g.beginPath(); g.moveTo(0, y + h + 0.5); g.lineTo(this.width, y + h + 0.5); g.stroke();
    const colors = this.data.line_colors;
    this.holes(g, p, strip);
    strip.series.forEach((one, n) => {
      g.strokeStyle = colors[n % colors.length];
      g.lineWidth = 1.25;
      g.beginPath();
      let pen = false, lastX = -1e9;
      for (let i = one.lo; i < one.hi; i++) {
        const v = one.value[i];
        if (Number.isNaN(v)) { pen = false; continue; }
        const x = this.x(one.time[i] + one.shift);
        if (x < -this.width) { lastX = x; }
        const yy = y + h - ((v - strip.base) / range) * (h - 17);
        if (pen) g.lineTo(x, yy); else g.moveTo(x, yy);
        pen = true;
        if (x > this.width * 2 && lastX < this.width * 2) break;
        lastX = x;
      }
      g.stroke();
    });
    g.lineWidth = 1;
    g.font = `10.5px ${css("--sans")}`;
    g.textBaseline = "top";
    g.fillStyle = p.dim;
    const words = quantity(strip.max, strip.unit);
    g.fillText(words, 6, y + 2);
    let x = 12 + g.measureText(words).width + 10;
    strip.series.slice(0, 6).forEach((one, n) => {
      g.fillStyle = colors[n % colors.length];
      g.fillRect(x, y + 4, 7, 7);
      g.fillStyle = p.dim;
      g.fillText(one.label, x + 11, y + 2);
      x += 24 + g.measureText(one.label).width;
    });
    if (strip.base > 0) { g.textBaseline = "bottom"; g.fillText(quantity(strip.base, strip.unit), 6, y + h - 1); }
  }

  /** Where nothing was sampled, said so: a line across a hole would be invented. */
  holes(g, p, strip) {
    const one = strip.series[0], { y, h } = strip, spans = [];
    if (!one.sampled) return;
    let last = null;
    for (let i = one.lo; i < one.hi; i++) {
      const x = this.x(one.time[i] + one.shift);
      if (Number.isNaN(one.value[i])) continue;
      if (last === null ? x > 2 : i - last.i > 1) spans.push([last === null ? 0 : last.x, x]);
      last = { i, x };
    }
    if (last !== null && last.x < this.width - 2) spans.push([last.x, this.width]);
    g.font = `10.5px ${css("--sans")}`;
    g.textBaseline = "middle";
    for (const [from, to] of spans) {
      const a = Math.max(from, 0), b = Math.min(to, this.width);
      if (b - a < 2) continue;
      g.fillStyle = p.shade;
      g.fillRect(a, y + 17, b - a, h - 17);
      if (b - a > 76) { g.fillStyle = p.dim; g.fillText("no samples", a + 6, y + 17 + (h - 17) / 2); }
    }
  }

  laneOf(i) {
    const row = this.rowOf(i);
    return this.lanes.find((l) => l.row === row && l.type !== "rank") ?? this.lanes.find((l) => l.row.group === row.group && l.type === row.type);
  }

  /** From the call to the event that it launched. */
  arrow(g, p, i) {
    const launch = this.launchOf(i), from = launch >= 0 && this.laneOf(launch), to = this.laneOf(i);
    if (!from || !to || this.pack.start[launch] === this.pack.start[i]) return;
    const x0 = this.x(this.pack.start[launch]), x1 = this.x(this.pack.start[i]), y0 = from.y, y1 = to.y + to.h, bend = Math.max(18, Math.abs(y1 - y0) / 3);
    g.strokeStyle = g.fillStyle = p.accent;
    g.lineWidth = 1.5;
    g.beginPath(); g.moveTo(x0, y0); g.bezierCurveTo(x0, y0 - bend, x1, y1 + bend, x1, y1 + 5); g.stroke();
    g.beginPath(); g.moveTo(x1, y1); g.lineTo(x1 - 4, y1 + 7); g.lineTo(x1 + 4, y1 + 7); g.fill();
    g.lineWidth = 1;
  }

  marks(g, p) {
    if (this.stretch && !this.dragging) {
      const a = this.x(this.stretch[0]), b = this.x(this.stretch[1]);
      g.fillStyle = g.strokeStyle = p.accent;
      g.globalAlpha = 0.1;
      g.fillRect(a, 0, b - a, this.height);
      g.globalAlpha = 1;
      g.strokeRect(Math.round(a) + 0.5, -1, Math.max(Math.round(b - a), 1), this.height + 2);
    }
    if (this.selected) {
      this.arrow(g, p, this.selected.i);
      const first = this.launchedBy(this.selected.i)[0];
      if (first !== undefined) this.arrow(g, p, first);
    }
    for (const [mark, color] of [[this.hover, p.soft], [this.selected, p.text]]) {
      if (!mark) continue;
      const lane = mark.lane?.type === "rank" ? mark.lane : this.laneOf(mark.i);
      if (!lane) continue;
      const { start, end } = lane.row.pack, shift = lane.shift ?? 0;
      const x0 = this.x(start[mark.i] + shift), x1 = this.x(end[mark.i] + shift);
      g.strokeStyle = color;
      g.lineWidth = mark === this.selected ? 2 : 1;
      g.strokeRect(Math.max(x0, -3) + 0.5, lane.y - 0.5, Math.max(2, Math.min(x1, this.width + 3) - Math.max(x0, -3)) - 1, lane.h + 1);
      g.lineWidth = 1;
    }
    if (this.dragging?.mode === "zoom" && Math.abs(this.dragging.x - this.dragging.from) > 3) {
      const a = Math.min(this.dragging.from, this.dragging.x), b = Math.max(this.dragging.from, this.dragging.x);
      g.fillStyle = p.accent;
      g.globalAlpha = 0.14;
      g.fillRect(a, 0, b - a, this.height);
      g.globalAlpha = 1;
      g.strokeStyle = p.accent;
      g.strokeRect(a + 0.5, -1, b - a, this.height + 2);
      g.fillStyle = p.text;
      g.textBaseline = "middle";
      g.fillText(duration(this.t(b) - this.t(a)), Math.min(b + 6, this.width - 60), 12);
    } else if (this.cursor !== null && this.cursor !== undefined) {
      g.strokeStyle = p.dim;
      g.globalAlpha = 0.5;
      g.beginPath(); g.moveTo(this.cursor + 0.5, RULER); g.lineTo(this.cursor + 0.5, this.height); g.stroke();
      g.globalAlpha = 1;
    }
  }

  drawMini() {
    const g = this.mini.getContext("2d"), p = this.palette(), w = this.width, full = this.window.dur_ns;
    g.clearRect(0, 0, w, MINI);
    const keep = [this.t0, this.t1, this.matches];
    const state = this.pack.rows.find((r) => r.type === "state");
    if (state) {
      [this.t0, this.t1, this.matches] = [0, full, null];
      this.lane(g, p, { row: state, y: 8, h: MINI - 16, type: "mini" });
      [this.t0, this.t1, this.matches] = keep;
    }
    const a = (this.t0 / full) * w, b = (this.t1 / full) * w;
    if (b - a < w - 1) {
      g.fillStyle = p.bg;
      g.globalAlpha = 0.72;
      g.fillRect(0, 0, a, MINI);
      g.fillRect(b, 0, w - b, MINI);
      g.globalAlpha = 1;
      g.strokeStyle = p.text;
      g.strokeRect(a + 0.5, 1.5, Math.max(b - a - 1, 2), MINI - 4);
    }
  }

  // ---- moving ----

  zoom(factor, at) {
    const x = at === undefined ? this.width / 2 : at, t = this.t(x), span = (this.t1 - this.t0) * factor;
    this.range(t - (x / this.width) * span, t - (x / this.width) * span + span);
  }

  pan(share) {
    const by = (this.t1 - this.t0) * share;
    this.range(this.t0 + by, this.t1 + by);
  }

  range(t0, t1) {
    const full = this.window.dur_ns, span = Math.round(Math.min(Math.max(t1 - t0, MIN_SPAN_NS), full));
    this.t0 = Math.round(Math.min(Math.max(t0, 0), full - span));
    this.t1 = this.t0 + span;
    this.remember();
    this.draw();
  }

  /** Select a stretch for its sums. */
  mark(stretch) {
    this.selected = null;
    this.stretch = stretch && [Math.max(Math.min(...stretch), 0), Math.min(Math.max(...stretch), this.window.dur_ns)];
    this.dock.show();
    this.remember();
    this.draw();
  }

  async turnTo(rank) {
    const { t0, t1 } = this, zoomed = t1 - t0 < this.window.dur_ns;
    await this.show(rank.window);
    if (zoomed) this.range(t0 - rank.shift, t1 - rank.shift);
    this.remember();
  }

  listen() {
    $("tl-path").hidden = !this.data.timeline_path;
    $("tl-path").addEventListener("click", () => this.togglePath());
    $("tl-in").addEventListener("click", () => this.zoom(0.5));
    $("tl-out").addEventListener("click", () => this.zoom(2));
    $("tl-fit").addEventListener("click", () => this.range(0, this.window.dur_ns));
    $("tl-next").addEventListener("click", () => this.jump(1));
    $("tl-prev").addEventListener("click", () => this.jump(-1));
    let later = 0;
    const find = (words) => { this.search(words); this.remember(); };
    $("tl-search").addEventListener("input", (e) => { clearTimeout(later); later = setTimeout(() => find(e.target.value), 80); });
    $("tl-search").addEventListener("keydown", (e) => { if (e.key === "Enter") { e.preventDefault(); find(e.target.value); this.jump(e.shiftKey ? -1 : 1); } });
    $("tl-only").addEventListener("click", () => { this.keepOnly(null); this.remember(); });
    this.body.addEventListener("keydown", (e) => this.key(e));
    const c = this.canvas;
    c.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    c.addEventListener("pointerdown", (e) => this.down(e));
    c.addEventListener("pointermove", (e) => this.move(e));
    c.addEventListener("pointerup", (e) => this.up(e));
    c.addEventListener("pointercancel", () => { this.dragging = null; this.draw(); });
    c.addEventListener("pointerleave", () => { if (!this.dragging) { this.hover = null; this.cursor = null; tip.hide(); this.draw(); } });
    c.addEventListener("dblclick", () => this.range(0, this.window.dur_ns));
    const slide = (e) => {
      const box = this.mini.getBoundingClientRect(), span = this.t1 - this.t0, t = ((e.clientX - box.left) / box.width) * this.window.dur_ns;
      this.range(t - span / 2, t + span / 2);
    };
    this.mini.addEventListener("pointerdown", (e) => { this.mini.setPointerCapture(e.pointerId); slide(e); });
    this.mini.addEventListener("pointermove", (e) => { if (e.buttons) slide(e); });
  }

  key(e) {
    if (e.target !== this.body || e.ctrlKey || e.metaKey || e.altKey) return;
    const act = {
      ArrowLeft: () => this.pan(-0.15), a: () => this.pan(-0.15), ArrowRight: () => this.pan(0.15), d: () => this.pan(0.15),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), w: () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), s: () => this.zoom(1 / 0.6),
      0: () => this.range(0, this.window.dur_ns), Home: () => this.range(0, this.window.dur_ns),
      Enter: () => this.jump(e.shiftKey ? -1 : 1), "/": () => $("tl-search").focus(),
      f: () => this.selected && this.around(this.selected.i), Escape: () => (this.selected ? this.select(null) : this.mark(null)), z: () => this.stretch && this.range(...this.stretch),
      c: () => this.togglePath(), "[": () => this.neighbour(-1), "]": () => this.neighbour(1),
    }[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  }

  wheel(e) {
    const box = this.canvas.getBoundingClientRect(), x = e.clientX - box.left;
    const active = this.body.contains(document.activeElement);
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      this.pan((e.deltaX || e.deltaY) / this.width);
    } else if (e.ctrlKey || e.metaKey || active) {
      e.preventDefault();
      this.zoom(Math.exp(Math.max(-80, Math.min(80, e.deltaY)) * 0.004), x);
    } else {
      this.hint.classList.add("on");
      clearTimeout(this.hintTimer);
      this.hintTimer = setTimeout(() => this.hint.classList.remove("on"), 1200);
    }
  }

  down(e) {
    if (e.button > 1) return;
    const x = e.offsetX, mode = e.shiftKey || e.button === 1 ? "pan" : "zoom";
    this.canvas.setPointerCapture(e.pointerId);
    this.dragging = { mode, from: x, x, y: e.offsetY, t0: this.t0, t1: this.t1 };
    this.canvas.classList.toggle("pan", mode === "pan");
    this.body.focus({ preventScroll: true });
    tip.hide();
    e.preventDefault();
  }

  move(e) {
    const x = e.offsetX;
    if (this.dragging) {
      this.dragging.x = Math.max(0, Math.min(x, this.width));
      if (this.dragging.mode === "pan") {
        const by = ((this.dragging.from - x) * (this.dragging.t1 - this.dragging.t0)) / this.width;
        this.range(this.dragging.t0 + by, this.dragging.t1 + by);
      }
      this.draw();
      return;
    }
    this.cursor = x;
    const found = this.at(x, e.offsetY);
    this.hover = found;
    this.canvas.classList.toggle("over", Boolean(found));
    if (found) tip.show(e.clientX, e.clientY, () => this.describe(found));
    else {
      const strip = this.strips.find((s) => e.offsetY >= s.y && e.offsetY <= s.y + s.h);
      if (strip) tip.show(e.clientX, e.clientY, () => this.read(strip, this.t(x)));
      else tip.hide();
    }
    this.draw();
  }

  up(e) {
    const drag = this.dragging;
    this.dragging = null;
    this.canvas.classList.remove("pan");
    if (!drag) return;
    if (drag.mode === "zoom" && Math.abs(drag.x - drag.from) > 4) {
      const a = this.t(Math.min(drag.from, drag.x)), b = this.t(Math.max(drag.from, drag.x));
      this.mark([a, b]);
    } else if (Math.abs(drag.x - drag.from) <= 4) this.click(this.at(e.offsetX, e.offsetY));
    this.draw();
  }

  click(mark) {
    const rank = mark?.lane.rank;
    if (rank && rank.window !== this.window) this.turnTo(rank);
    else this.select(mark);
  }

  /** The event at a place, or the nearest within three pixels. */
  at(x, y) {
    const lane = this.lanes.find((l) => y >= l.y && y <= l.y + l.h + 1);
    if (!lane) return null;
    const { start, end } = lane.row.pack, t = this.t(x) - (lane.shift ?? 0), slack = (3 * (this.t1 - this.t0)) / this.width;
    let i = lowerBound(start, t, lane.row.lo, lane.row.hi);
    if (i > lane.row.lo && end[i - 1] >= t) i--;
    else if (i > lane.row.lo && (i >= lane.row.hi || t - end[i - 1] < start[i] - t)) i--;
    if (i >= lane.row.hi || i < lane.row.lo) return null;
    return start[i] - slack <= t && end[i] + slack >= t ? { i, lane } : null;
  }

  // ---- words ----

  causesOf(i, pack = this.pack) {
    const k = pack.kind[i], { first, second } = this.kinds, out = [];
    const share = pack.share[i] / 255, label = (c) => this.data.cause_labels[this.names[c]] || this.names[c], color = (c) => this.data.cause_colors[this.names[c]];
    if (first[k] < 0) return out;
    if (second[k] < 0) return [[label(first[k]), null, color(first[k])]];
    out.push([label(first[k]), share, color(first[k])]);
    out.push([label(second[k]), null, color(second[k])]);
    return out;
  }

  facts(i, pack = this.pack) {
    const k = pack.kind[i], { kinds, names } = this, category = names[kinds.category[k]];
    const facts = [["Duration", duration(pack.dur[i])], ["Starts at", duration(pack.start[i])]];
    if (kinds.op[k] >= 0) facts.push(["Operator", names[kinds.op[k]]]);
    if (kinds.layer[k] >= 0) facts.push(["Layer", names[kinds.layer[k]]]);
    if (kinds.phase[k] >= 0) facts.push(["Phase", names[kinds.phase[k]]]);
    if (category in HOST_COLORS) facts.push(["Host", category]);
    return facts;
  }

  describe({ i, lane }) {
    const { pack } = lane.row, k = pack.kind[i], device = !["phase", "layer", "state", "path"].includes(this.names[this.kinds.category[k]]);
    const nodes = [el("div", { class: "t" }, this.title(k)), ...(lane.rank ? [tipRow("Rank", lane.rank.label)] : []), ...this.facts(i, pack).map(([a, b]) => tipRow(a, b))];
    const causes = this.causesOf(i, pack);
    causes.forEach(([label, share, color], n) => nodes.push(tipRow(n ? "" : "Counts as", share === null ? (n ? `then ${label}` : label) : `${label} ${percent(share)}`, color)));
    if (!causes.length && device && !(this.names[this.kinds.category[k]] in HOST_COLORS)) nodes.push(tipRow("Counts as", "hidden under other work: costs no time"));
    return nodes;
  }

  read(strip, t) {
    const colors = this.data.line_colors;
    return [el("div", { class: "t" }, strip.panel), ...strip.series.map((one, n) => {
      const i = Math.min(Math.max(lowerBound(one.time, t - one.shift, one.lo, one.hi), one.lo), one.hi - 1);
      return tipRow(quantity(one.value[i], one.unit), one.label, colors[n % colors.length]);
    })];
  }

  select(mark) {
    this.selected = mark;
    this.dock.show();
    this.remember();
    this.draw();
  }

  markOf(i) { return { i, lane: this.laneOf(i) }; }

  rowOf(i, pack = this.pack) { return pack.rows.find((r) => i >= r.lo && i < r.hi); }

  /** The host span that launched an event, -1 where it is not here. */
  launchOf(i) {
    const number = this.pack.launch[i];
    return number > 0 ? this.pack.launches[number - 1] : -1;
  }

  /** The events that a host span launched, the first to run first. */
  launchedBy(i) {
    const { pack } = this, number = pack.share[i] && this.rowOf(i).type === "host" ? pack.launches.indexOf(i) + 1 : 0, events = [];
    if (!number) return events;
    for (const row of pack.rows) if (row.type === "device") for (let j = row.lo; j < row.hi; j++) if (pack.launch[j] === number) events.push(j);
    return events.sort((a, b) => pack.start[a] - pack.start[b]);
  }

  /** The spans of one lane around a span and itself, the outermost first. */
  enclosing(i) {
    const { start, end, rows } = this.pack, own = this.rowOf(i), frames = [];
    for (const row of rows) {
      if (row.type !== own.type || row.group !== own.group || row.depth > own.depth) continue;
      const at = lowerBound(start, start[i] + 0.5, row.lo, row.hi) - 1;
      if (at >= row.lo && end[at] >= end[i]) frames.push(at);
    }
    return frames;
  }

  /** Calls back with each event of a row that overlaps a stretch, and for how long. */
  within(row, a, b, use) {
    const { start, end } = row.pack;
    let i = lowerBound(start, a, row.lo, row.hi);
    if (i > row.lo && end[i - 1] > a) i--;
    for (; i < row.hi && start[i] < b; i++) use(i, Math.min(end[i], b) - Math.max(start[i], a));
  }

  familyOf(own) {
    const rows = this.pack.rows.filter((r) => r.type === own.type && (own.type !== "host" || r.group === own.group));
    return { lo: Math.min(...rows.map((r) => r.lo)), hi: Math.max(...rows.map((r) => r.hi)) };
  }

  // ---- searching ----

  search(text) {
    this.query = text;
    const words = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
    $("tl-prev").disabled = $("tl-next").disabled = true;
    if ((!words.length && !this.only) || !this.pack) { this.matches = null; $("tl-hits").textContent = ""; this.draw(); return; }
    const { kinds, names, pack } = this, n = kinds.name.length, lower = names.map((s) => s.toLowerCase());
    const hit = new Uint8Array(n);
    for (let k = 0; k < n; k++) {
      const where = [kinds.name[k], kinds.op[k], kinds.layer[k]].map((i) => (i < 0 ? "" : lower[i])).join(" ");
      hit[k] = words.every((w) => where.includes(w)) && (!this.only || this.isOf(k)) ? 1 : 0;
    }
    const prefix = new Uint32Array(pack.kind.length + 1), list = [];
    let total = 0;
    for (const row of pack.rows) {
      const counted = row.type === "device" || row.type === "host" || (row.type === "state" && this.only?.field === "cause");
      for (let i = row.lo; i < row.hi; i++) {
        const yes = hit[pack.kind[i]];
        prefix[i + 1] = prefix[i] + yes;
        if (yes && counted) { list.push(i); if (row.type === "device") total += pack.dur[i]; }
      }
    }
    list.sort((a, b) => pack.start[a] - pack.start[b]);
    this.matches = { kinds: hit, prefix, list };
    $("tl-hits").textContent = list.length ? `${count(list.length)} found${total ? `, ${duration(total)} on the device` : ""}` : "nothing found";
    $("tl-prev").disabled = $("tl-next").disabled = !list.length;
    this.draw();
  }

  /** Show events of one cause, kernel, operator, layer or phase only: `field:value`; null for all. */
  keepOnly(text) {
    const [, field, value] = /^(cause|kernel|op|layer|phase):([^]*)$/.exec(text ?? "") ?? [];
    this.only = field ? { field, value } : null;
    const words = { op: "operator" }[field] ?? field, shown = field === "cause" && Object.hasOwn(this.data.cause_labels, value) ? this.data.cause_labels[value] : value;
    $("tl-only").hidden = !field;
    $("tl-only").replaceChildren(...(field ? [el("span", {}, `${words} ${shown}`), " ×"] : []));
    this.search(this.query);
  }

  /** Whether a kind is of the cause, kernel, operator, layer or phase that is shown. */
  isOf(k) {
    const { kinds, names } = this, { field, value } = this.only;
    if (field === "cause") return [kinds.first[k], kinds.second[k]].some((c) => c >= 0 && (names[c] === value || names[c].startsWith(`${value}.`)));
    if (names[kinds.category[k]] in HOST_COLORS) return false;
    const at = { kernel: kinds.name, op: kinds.op, layer: kinds.layer, phase: kinds.phase }[field][k];
    if (at < 0) return false;
    // Long names are cut in the middle where a table shows them.
    const [head, tail] = value.split("…");
    return names[at] === value || (tail !== undefined && names[at].startsWith(head) && names[at].endsWith(tail));
  }

  /** Go to the longest event that is shown, in this window or the next that has one. */
  async longest() {
    const began = this.window, others = this.windows.filter((w) => w !== began)
      .sort((a, b) => (b.rank === began.rank) - (a.rank === began.rank) || b.dur_ns - a.dur_ns).slice(0, 16);
    for (const window of [began, ...others]) {
      if (window !== this.window) await this.show(window);
      const list = this.matches?.list ?? [], { dur, start } = this.pack;
      if (!list.length) continue;
      const best = list.reduce((a, i) => (dur[i] > dur[a] ? i : a), list[0]), span = Math.min(Math.max(dur[best] * 12, 2000), this.window.dur_ns);
      this.range(start[best] + dur[best] / 2 - span / 2, start[best] + dur[best] / 2 + span / 2);
      this.select(this.markOf(best));
      return;
    }
    await this.show(began);
    $("tl-hits").textContent = "no event here counts mainly as this";
  }

  jump(step) {
    const list = this.matches?.list;
    if (!list?.length) return;
    const { start } = this.pack, from = this.selected ? start[this.selected.i] : this.t0 - 1;
    let next = step > 0 ? list.findIndex((i) => start[i] > from) : list.findLastIndex((i) => start[i] < from);
    if (next < 0) next = step > 0 ? 0 : list.length - 1;
    this.around(list[next]);
  }

  neighbour(step) {
    if (!this.selected) return;
    const row = this.rowOf(this.selected.i), i = this.selected.i + step;
    if (i >= row.lo && i < row.hi) this.around(i, true);
  }

  around(i, keepZoom) {
    const row = this.rowOf(i);
    if (row.type === "host" && row.depth > 0 && !this.expanded.get(row.group)) { this.expanded.set(row.group, true); this.layout(); this.resize(); }
    const { start, end, dur } = this.pack, middle = (start[i] + end[i]) / 2;
    const span = keepZoom && dur[i] < this.t1 - this.t0 ? this.t1 - this.t0 : Math.min(Math.max(dur[i] * 8, 2000), this.window.dur_ns);
    if (!keepZoom || start[i] < this.t0 || end[i] > this.t1) this.range(middle - span / 2, middle + span / 2);
    this.select(this.markOf(i));
  }
}
