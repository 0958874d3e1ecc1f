const $ = (id) => document.getElementById(id);
const DASH = "–";

/** Element with properties and children; text is always text, never markup. */
function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

const three = (v) => (Math.abs(v) >= 99.95 ? v.toFixed(0) : Math.abs(v) >= 9.995 ? v.toFixed(1) : v.toFixed(2));

/** Nanoseconds for people, as chopper.wording.duration. */
function duration(ns) {
  if (ns === null || ns === undefined) return DASH;
  if (ns < 0) return "−" + duration(-ns);
  if (ns === 0) return "0";
  if (ns >= 60e9) {
    const s = Math.round(ns / 1e9);
    return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  }
  if (ns < 999.5) return `${ns.toFixed(0)} ns`;
  if (ns < 999500) return `${three(ns / 1e3)} µs`;
  if (ns < 999500000) return `${three(ns / 1e6)} ms`;
  return `${three(ns / 1e9)} s`;
}

function percent(ratio) {
  if (ratio === null || ratio === undefined) return DASH;
  const p = ratio * 100;
  if (p === 0) return "0 %";
  if (Math.abs(p) < 0.05) return "<0.1 %";
  return Math.abs(p) >= 99.95 ? `${p.toFixed(0)} %` : `${p.toFixed(1)} %`;
}

const count = (n) => Math.round(n).toLocaleString("en-US").replaceAll(",", "\u202f");

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(n) >= 999.5 && i < units.length - 1) { n /= 1024; i++; }
  return i ? `${three(n)} ${units[i]}` : `${n.toFixed(0)} B`;
}

function rate(n) {
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let i = 0;
  while (Math.abs(n) >= 999.5 && i < units.length - 1) { n /= 1000; i++; }
  return `${i ? three(n) : n.toFixed(0)} ${units[i]}`;
}

/** A value in the largest unit below it, three digits: as chopper.wording. */
function scaled(value, base, units) {
  let i = 0;
  while (Math.abs(value) >= Math.min(base, 999.5) && i < units.length - 1) { value /= base; i++; }
  return `${i ? three(value) : value.toFixed(0)} ${units[i]}`;
}

/** As chopper.wording.joules. */
function joules(v) {
  if (v < 0) return `−${joules(-v)}`;
  if (v > 0 && v < 999.5e-6) return `${three(v * 1e6)} µJ`;
  if (v > 0 && v < 0.9995) return `${three(v * 1e3)} mJ`;
  return v < 999.5 ? `${three(v)} J` : scaled(v, 1000, ["J", "kJ", "MJ", "GJ"]);
}

const plain = (v) => (Number.isInteger(v) || Math.abs(v) >= 999.5 ? count(v) : three(v));
const SI = ["", "k", "M", "G", "T", "P"];
/** Unit of a column's name → how its values read. */
const UNITS = {
  ns: duration, ratio: percent, count, bytes: (v) => scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]),
  bytes_per_s: (v) => scaled(v, 1000, SI.map((s) => `${s}B/s`)), flop: (v) => scaled(v, 1000, SI.map((s) => `${s}FLOP`)),
  flop_per_s: (v) => scaled(v, 1000, SI.map((s) => `${s}FLOP/s`)), hz: (v) => scaled(v, 1000, ["Hz", "kHz", "MHz", "GHz"]),
  factor: (v) => `${v >= 10 ? three(v) : v.toFixed(1)}×`, w: (v) => `${three(v)} W`, j: joules, c: (v) => `${three(v)} °C`,
  id: String, bool: (v) => (v ? "yes" : "no"),
};

function quantity(value, unit) {
  if (value === null || Number.isNaN(value)) return DASH;
  if (unit === "ratio") return percent(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "bytes_per_s") return rate(value);
  if (unit === "hz" || unit === "w" || unit === "c") return UNITS[unit](value);
  return `${three(value)}${unit ? " " + unit : ""}`;
}

/** A colour or font of the style sheet; while printing, of the light scheme. */
function css(name) {
  return getComputedStyle(css.printing ? $("light") : document.documentElement).getPropertyValue(name).trim();
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

/** Bytes of a deflated, base64-coded block of this page. */
async function inflate(id) {
  const stream = new Blob([fromBase64($(id).textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function inflateText(id) {
  return new TextDecoder().decode(await inflate(id));
}

const TYPES = {
  u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, i8: Int8Array, i16: Int16Array, i32: Int32Array,
  f32: Float32Array, f64: Float64Array,
};

/** Columns of a pack: see chopper/reports/to_html.py. */
async function unpack(id) {
  const buffer = await inflate(id);
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const arrays = {};
  for (const { name, type, count: n } of header.arrays) {
    const Kind = TYPES[type], width = Kind.BYTES_PER_ELEMENT;
    const planes = new Uint8Array(buffer, at, n * width);
    at += n * width;
    const flat = new Uint8Array(n * width);
    for (let b = 0; b < width; b++) {
      for (let i = 0, from = b * n, to = b; i < n; i++, to += width) flat[to] = planes[from + i];
    }
    arrays[name] = new Kind(flat.buffer);
  }
  return { meta: header.meta, arrays };
}

const tip = {
  node: null,
  show(x, y, build) {
    this.node ||= $("tip");
    this.node.replaceChildren(...build());
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth - 8 ? Math.max(8, x - box.width - 12) : x + 16;
    const top = y + 18 + box.height > innerHeight - 8 ? Math.max(8, y - box.height - 12) : y + 18;
    this.node.style.transform = `translate(${left}px, ${top}px)`;
  },
  hide() {
    if (this.node) this.node.hidden = true;
  },
};

const tipRow = (label, value, color) =>
  el("div", { class: "r" }, el("span", {}, label), el("b", {}, color ? el("i", { style: { background: color } }) : null, value));

const idle = window.requestIdleCallback ? (f) => requestIdleCallback(f, { timeout: 500 }) : (f) => setTimeout(f, 30);

/** What scrolls sideways can be reached by keyboard. */
new ResizeObserver(() => {
  for (const host of document.querySelectorAll(".card.flush")) {
    if (host.scrollWidth > host.clientWidth) host.tabIndex = 0; else host.removeAttribute("tabindex");
  }
}).observe(document.body);
