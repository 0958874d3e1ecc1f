/** Plotly, inflated and evaluated once, when the first figure comes into view. */
let plotly = null;
function loadPlotly() {
  plotly ||= (async () => {
    const code = await inflateText("plotly");
    document.head.append(el("script", {}, code)); // allowed by its hash in the policy
    if (!window.Plotly) throw new Error("plotly did not start");
    return window.Plotly;
  })();
  return plotly;
}

/** What belongs to the reader's colour scheme, laid over a figure. */
function themed(figure) {
  const text = css("--text-2"), faint = css("--text-3"), grid = css("--line-2"), line = css("--line");
  const layout = structuredClone(figure.layout);
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: { family: css("--sans"), size: 12, color: text },
    hoverlabel: { bgcolor: css("--card"), bordercolor: line, font: { color: css("--text"), size: 12, family: css("--sans") }, align: "left" },
    dragmode: false,
  });
  for (const key of Object.keys(layout)) {
    if (!/^[xy]axis/.test(key)) continue;
    const axis = layout[key];
    Object.assign(axis, { gridcolor: grid, zerolinecolor: line, linecolor: line, tickcolor: line, fixedrange: !figure.zoom });
    axis.title = { ...axis.title, font: { size: 12, color: faint }, standoff: 10 };
    const named = key.startsWith("y") && (axis.type === "category" || axis.ticktext);
    axis.tickfont = { color: named ? css("--text") : faint, size: named ? 12.5 : 11.5 };
    if (key.startsWith("y") && axis.type === "category") { axis.ticks = ""; axis.showgrid = false; axis.ticklabelstandoff = 8; }
    if (key.startsWith("x") && axis.type === "category") axis.showgrid = false;
  }
  for (const note of layout.annotations || []) {
    note.font = { size: 12, color: text };
    if (note.name === "panel" && NARROW.matches && !css.printing) note.text = fitting(note.text.split("   "));
  }
  for (const shape of layout.shapes || []) if (shape.name !== "mark") shape.fillcolor = css(shape.name === "step-odd" ? "--shade" : "--shade-2");
  const data = figure.data.map((trace) => {
    const out = { ...trace };
    if (Array.isArray(trace.marker?.color)) out.marker = { ...trace.marker, color: trace.marker.color.map((c) => c || css("--text")) };
    if (trace.marker?.colorbar) out.marker = { ...trace.marker, colorbar: { ...trace.marker.colorbar, tickfont: { color: faint, size: 11 }, title: { ...trace.marker.colorbar.title, font: { color: faint, size: 11 } } } };
    if (trace.orientation === "h") { out.textfont = { color: text, size: 12 }; }
    return out;
  });
  if (NARROW.matches && !css.printing) above(data.filter((trace) => trace.orientation === "h" && trace.meta !== "schedule"), layout);
  return { data, layout };
}

/** The names of lines that a narrow screen has room for. */
function fitting(names) {
  const room = (innerWidth - 120) / 6.9, length = (texts) => texts.join("   ").replace(/<[^>]*>|&\w+;/g, "").length;
  let shown = names;
  for (let n = names.length - 1; n > 0 && length(shown) > room; n--) shown = [...names.slice(0, n), "…"];
  return shown.join("   ");
}

/** Moves the names and the words of bars above them: beside them a narrow screen has no room. */
function above(bars, layout) {
  if (!bars.length || layout.yaxis.type !== "category") return;
  const names = bars[0].y, notes = layout.annotations || [], wide = (innerWidth - 80) / 6.6;
  const cut = (name, room) => (name.length <= room || name.includes("&") ? name : `${name.slice(0, room - 1).trimEnd()}…`);
  const place = (text, y, x, xanchor) => ({ text, y, x, xanchor, xref: "paper", yshift: 17, showarrow: false, font: { size: 12, color: css("--text") } });
  layout.annotations = notes.filter((note) => !names.includes(note.y)).concat(names.flatMap((name, i) => {
    const words = bars[0].text?.[i] ?? notes.find((note) => note.y === name)?.text ?? "";
    return [place(cut(name, Math.floor(wide - words.length - 2)), name, 0, "left"), place(words, name, 1, "right")];
  }));
  for (const trace of bars) Object.assign(trace, { width: 0.3, text: null });
  layout.height += 16 * names.length;
  Object.assign(layout.margin, { l: 8, r: 8 });
  Object.assign(layout.yaxis, { showticklabels: false, automargin: false });
}

const NARROW = matchMedia("(max-width: 820px)");
const CONFIG = { displayModeBar: false, displaylogo: false, responsive: true, doubleClick: "reset" };

/** Width of a printed page within its margins, A4 or Letter. */
const PAPER_PX = 700;

class Plots {
  constructor(figures) {
    this.figures = figures;
    this.drawn = new Map();
    this.done = new Set();
    for (const name of Object.keys(figures)) {
      const host = document.querySelector(`[data-figure="${name}"]`);
      if (!host || !figures[name].data.length) { if (host) host.replaceChildren(el("p", { class: "empty" }, "Nothing to draw.")); continue; }
      host.style.minHeight = `${figures[name].layout.height}px`;
      host.classList.add("pending");
      host.textContent = "Drawing …";
    }
  }

  /** Figures are drawn when they come near the view. */
  start() {
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { watch.unobserve(entry.target); this.draw(entry.target); }
    }, { rootMargin: "300px" });
    document.querySelectorAll(".plot.pending").forEach((host) => watch.observe(host));
    for (const media of [NARROW, matchMedia("(prefers-color-scheme: dark)")]) media.addEventListener("change", () => this.redraw());
  }

  async draw(host) {
    const name = host.dataset.figure;
    if (this.drawn.has(name)) return this.drawn.get(name);
    const job = (async () => {
      try {
        const Plotly = await loadPlotly();
        const { data, layout } = themed(this.figures[name]);
        host.textContent = "";
        host.classList.remove("pending");
        await Plotly.newPlot(host, data, layout, CONFIG);
        this.done.add(name);
        host.dispatchEvent(new CustomEvent("drawn"));
      } catch (error) {
        host.textContent = `This figure needs a browser of 2023 or later (${error.message}).`;
        console.error(error);
      }
    })();
    this.drawn.set(name, job);
    return job;
  }

  /** Every figure, one after the other while nothing else is to do: so that the page prints whole. */
  async rest() {
    for (const host of document.querySelectorAll(".plot.pending")) {
      await new Promise((done) => idle(done));
      await this.draw(host);
    }
  }

  /** Drawn figures again, in the colours and width of now; at once, so that it can precede printing. */
  redraw() {
    const screen = document.querySelector("main").clientWidth;
    for (const name of this.done) {
      const { data, layout } = themed(this.figures[name]), host = document.querySelector(`[data-figure="${name}"]`);
      if (css.printing) layout.width = Math.round(PAPER_PX * host.clientWidth / screen);
      window.Plotly.react(host, data, layout, CONFIG);
    }
  }
}
