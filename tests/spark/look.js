// What a person does with the page, and what there is to be seen then, put into the page itself.
addEventListener("load", () => {
  const seen = {}, text = (id) => document.getElementById(id).textContent;
  const hover = (id) => {
    const host = document.getElementById(id), box = host.getBoundingClientRect();
    const event = new PointerEvent("pointermove", {bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + 20});
    (host.firstElementChild || host).dispatchEvent(event);
    return document.getElementById("tip").hidden ? null : text("tip");
  };
  const tiles = () => Object.fromEntries([...document.querySelectorAll(".tile")].map((tile) => [tile.children[0].textContent, tile.children[1].textContent]));
  const ground = () => getComputedStyle(document.body).backgroundColor;
  seen.tiles = tiles();
  seen.drawn = Object.fromEntries(["throughput", "wait", "run", "backlog"].map((id) => [id, [...document.querySelectorAll(`#${id} path`)].filter((path) => path.getAttribute("d").length > 5).length]));
  seen.hover = Object.fromEntries(["throughput", "wait", "run", "backlog", "causes", "tasks", "groups", "workers"].map((id) => [id, hover(id)]));
  const charts = [...document.querySelectorAll(".chart svg")];
  seen.labels = charts.map((chart) => chart.getAttribute("aria-label"));
  seen.overlaps = charts.filter((chart) => {
    const times = [...chart.querySelectorAll("text")].filter((mark) => /[:-]/.test(mark.textContent)).map((mark) => mark.getBoundingClientRect());
    return times.some((box, n) => n > 0 && box.left < times[n - 1].right);
  }).length;
  seen.uneven = charts.filter((chart) => {
    const times = [...chart.querySelectorAll("text")].filter((mark) => /[:-]/.test(mark.textContent)).map((mark) => mark.getBoundingClientRect());
    const gaps = times.slice(1).map((box, n) => box.left + box.width / 2 - times[n].left - times[n].width / 2);
    return Math.max(...gaps) - Math.min(...gaps) > 2;
  }).length;
  const last = [...document.querySelectorAll(".tile")].pop();
  seen.ragged = Math.abs(last.getBoundingClientRect().right - last.parentElement.getBoundingClientRect().right) > 1;
  seen.text = document.querySelector("main").textContent; seen.per = text("per");
  const key = document.getElementById("backlog");
  key.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true})); seen.keyed = document.getElementById("tip").hidden ? null : text("tip");
  key.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
  seen.causes = text("causes"); seen.tasks = text("tasks"); seen.workers = text("workers"); seen.notes = text("notes");
  seen.ground = [ground()]; document.getElementById("theme").click(); seen.ground.push(ground());
  const choice = document.getElementById("queue");
  seen.queues = [...choice.options].map((option) => option.value);
  choice.value = "mail"; choice.dispatchEvent(new Event("change")); seen.mail = tiles();
  seen.hacked = document.documentElement.dataset.hacked || null;
  seen.overflow = document.documentElement.scrollWidth > innerWidth;
  const out = document.createElement("pre"); out.id = "seen"; out.textContent = JSON.stringify(seen); document.body.appendChild(out);
});
