const data = JSON.parse($("data").textContent);
const plots = new Plots(data.figures);

function printing(on) {
  css.printing = on;
  plots.redraw();
}
addEventListener("beforeprint", () => printing(true));
addEventListener("afterprint", () => printing(false));

(async () => {
  await new Promise((painted) => requestAnimationFrame(() => setTimeout(painted)));
  plots.start();
  await plots.rest();
  document.documentElement.dataset.ready = "all";
})();
