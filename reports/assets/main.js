const data = JSON.parse($("data").textContent);
data.cause_colors = Object.fromEntries(data.causes.map((c) => [c.id, c.color]));
data.cause_labels = Object.fromEntries(data.causes.map((c) => [c.id, c.label]));
for (const level of data.levels) {
  level.rows = level.rows.map(([full, shown, time, per, calls, own, causes, order]) => {
    const none = full === null;
    return { full: full ?? shown, shown, none, time, per, calls, own, causes, order, search: `${full ?? ""} ${shown}`.toLowerCase() };
  });
}

const timeline = data.timeline.length ? new Timeline(data) : null;
const breakdown = $("breakdown-table") && new Breakdown(data, $("breakdown-table"), $("tabs"), $("filter"));
const plots = new Plots(data.figures);
const details = $("details-table") ? inflateText("details-data").then((text) => new Details(JSON.parse(text), $("details-table"))) : null;

/** Calls back with the number of a bar that is pressed; anywhere on its row or column will do. */
function onBar(host, axis, act) {
  const [low, high, at] = axis === "x" ? ["left", "right", "clientX"] : ["top", "bottom", "clientY"];
  host.addEventListener("pointerdown", (down) => addEventListener("pointerup", (up) => {
    if (Math.hypot(up.clientX - down.clientX, up.clientY - down.clientY) > 4 || host.classList.contains("pending")) return;
    for (const trace of host.querySelectorAll(".bars")) {
      const bar = [...trace.querySelectorAll(".point")].findIndex((point) => {
        const box = point.getBoundingClientRect();
        return box[low] <= down[at] && down[at] <= box[high] && box[high] > box[low];
      });
      if (bar >= 0) { act(bar); return; }
    }
  }, { once: true, capture: true }), { capture: true });
}

function stepsFigure() {
  const host = $("fig-steps"), figure = data.figures.steps;
  $("steps-legend").replaceChildren(...figure.data.map((t) => el("li", {}, el("i", { style: { background: t.marker.color } }), t.name)));
  const ranks = Object.keys(figure.views || {});
  const select = $("steps-rank");
  if (ranks.length > 1) {
    $("steps-rank-l").hidden = false;
    const mean = figure.data.map((t) => t.y);
    select.append(el("option", { value: "" }, "all, mean"), ...ranks.map((r) => el("option", { value: r }, data.rank_labels[r] ?? r)));
    select.addEventListener("change", async () => {
      const heights = select.value ? figure.views[select.value] : mean;
      figure.data.forEach((trace, i) => { trace.y = heights[i]; });
      await plots.draw(host);
      const { data: traces, layout } = themed(figure);
      window.Plotly.react(host, traces, layout, CONFIG);
    });
  }
  onBar(host, "x", (i) => {
    if (!timeline || figure.binned) return;
    const rank = select.value ? Number(select.value) : timeline.window.rank;
    timeline.pick(rank, data.step_index[i]);
    reveal("timeline");
  });
}
/** Lets the reader choose what the heat map of ranks shows. */
function ranksFigure() {
  const host = $("fig-ranks"), figure = data.figures.ranks, measure = $("ranks-measure"), rows = $("ranks-rows");
  for (const [select, names] of [[measure, figure.views], [rows, figure.rows]]) {
    select.append(...Object.keys(names).map((name) => el("option", { value: name }, name)));
    select.addEventListener("change", async () => {
      const view = figure.views[measure.value];
      Object.assign(figure.data[0], view, averaged(view.z, figure.rows[rows.value]));
      await plots.draw(host);
      const { data: traces, layout } = themed(figure);
      window.Plotly.react(host, traces, layout, CONFIG);
    });
  }
  $("ranks-rows-l").hidden = Object.keys(figure.rows).length < 2;
}
/** Rows of one label as their mean over the cells that are known. */
function averaged(z, labels) {
  const y = [...new Set(labels)], at = new Map(y.map((label, i) => [label, i]));
  const sums = y.map(() => z[0].map(() => [0, 0]));
  z.forEach((row, i) => row.forEach((value, step) => {
    if (value !== null) { const cell = sums[at.get(labels[i])][step]; cell[0] += value; cell[1] += 1; }
  }));
  return { y, z: sums.map((row) => row.map(([sum, count]) => (count ? sum / count : null))) };
}
if ($("fig-ranks")) ranksFigure();
if ($("fig-steps")) stepsFigure();
if ($("fig-waterfall")) {
  onBar($("fig-waterfall"), "y", (i) => {
    const cause = data.figures.waterfall.causes[i];
    if (timeline && cause) location.hash = `timeline?${new URLSearchParams({ only: `cause:${cause}` })}`;
  });
}

document.querySelectorAll("[data-copy]").forEach((button) => {
  if (!navigator.clipboard) return;
  button.hidden = false;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(button.previousElementSibling.textContent);
    button.textContent = "Copied";
  });
});

// Printed pages are light, figures and timeline too.
function printing(on) {
  css.printing = on;
  plots.redraw();
  if (timeline) { timeline.colors = null; timeline.resize(); }
}
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));

// The section in view is marked in the bar.
const links = new Map([...document.querySelectorAll(".bar nav a")].map((a) => [a.hash.slice(1), a]));
const inView = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    links.forEach((a, id) => { if (id === entry.target.id) a.setAttribute("aria-current", "true"); else a.removeAttribute("aria-current"); });
  }
}, { rootMargin: "-20% 0px -70% 0px" });
document.querySelectorAll("main > section").forEach((s) => inView.observe(s));

(async () => {
  try {
    await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)));
    if (timeline) await timeline.start();
    state.parts = [timeline, breakdown].filter(Boolean);
    await state.apply(true);
    addEventListener("hashchange", () => state.apply(false));
    document.documentElement.dataset.ready = "timeline";
    performance.mark("chopper-timeline");
    const tables = await details;
    if (tables) await state.add(tables);
    await timeline?.ranksLoaded;
    plots.start();
    await plots.rest();
    document.documentElement.dataset.ready = "all";
    performance.mark("chopper-all");
  } catch (error) {
    $("tl-body")?.replaceChildren(el("p", { class: "note" }, `The timeline needs a browser of 2023 or later (${error.message}).`));
    console.error(error);
  }
})();
