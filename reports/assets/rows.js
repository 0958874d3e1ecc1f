const PAGE = 15;

/** Rows of a table that stands in the page: filtered, sorted, some at first. */
class Rows {
  constructor(host) {
    this.body = host.querySelector("tbody");
    this.rows = [...this.body.rows];
    this.filter = host.querySelector("input");
    this.more = host.querySelector(".grid-foot button");
    this.said = host.querySelector(".grid-foot span");
    this.limit = PAGE;
    this.heads = [...host.querySelectorAll("thead button")];
    this.heads.forEach((button, i) => button.addEventListener("click", () => this.sort(i)));
    this.filter.addEventListener("input", () => { this.limit = PAGE; this.draw(); });
    this.more.addEventListener("click", () => { this.limit += 100; this.draw(); });
    this.draw();
  }

  sort(column) {
    const head = this.heads[column].parentNode;
    const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
    this.heads.forEach((b) => b.parentNode.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const value = (row) => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent.toLowerCase() : Number(cell.dataset.v);
    };
    this.rows = this.rows.map((r) => [value(r), r]).sort((a, b) => sign * (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0)).map((p) => p[1]);
    this.body.replaceChildren(...this.rows);
    this.draw();
  }

  draw() {
    const words = this.filter.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, found = 0;
    for (const row of this.rows) {
      const name = (row.cells[0].querySelector("[title]")?.title ?? "").toLowerCase() + " " + row.cells[0].textContent.toLowerCase();
      const fits = words.every((w) => name.includes(w));
      found += fits;
      row.hidden = !fits || shown >= this.limit;
      shown += !row.hidden;
    }
    this.more.hidden = found <= shown;
    this.said.textContent = found ? `${count(shown)} of ${count(found)} rows` : "No row matches this name.";
  }
}
document.querySelectorAll("[data-rows]").forEach((host) => new Rows(host));
