"use strict";
(() => {
  const root = document.documentElement;
  const drawn = []; // functions that draw the plots again in the theme's colours

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name in made && typeof value === "boolean") made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const dark = () => root.dataset.theme === "dark";
  const short = (value) => (value === null || value === undefined ? "" : String(+value.toPrecision(4)));

  function applyTheme(isDark) {
    root.dataset.theme = isDark ? "dark" : "light";
    const button = document.getElementById("theme");
    button.setAttribute("aria-pressed", String(isDark));
    for (const again of drawn) again();
  }

  function startTheme() {
    const wish = matchMedia("(prefers-color-scheme: dark)");
    let chosen = null;
    try { chosen = localStorage.getItem("lodo-theme"); } catch { /* a page from a file may have no storage */ }
    applyTheme(chosen ? chosen === "dark" : wish.matches);
    wish.addEventListener("change", (event) => { if (!chosen) applyTheme(event.matches); });
    document.getElementById("theme").addEventListener("click", () => {
      applyTheme(!dark());
      chosen = root.dataset.theme;
      try { localStorage.setItem("lodo-theme", chosen); } catch { /* as above */ }
    });
  }

  async function unpack(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  }

  const layout = (more) => ({
    paper_bgcolor: colour("--paper"),
    plot_bgcolor: colour("--paper"),
    font: { color: colour("--ink"), family: "system-ui, sans-serif", size: 13 },
    margin: { l: 64, r: 12, t: 12, b: 48 },
    showlegend: false,
    hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--faint"), activecolor: colour("--ink") },
    ...more,
  });
  const axis = (title, more) => ({
    title: { text: title }, gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line"),
    exponentformat: "none", separatethousands: true, minorloglabels: "none", spikecolor: colour("--faint"),
    spikethickness: 1, spikedash: "dot", automargin: true, ...more,
  });
  const settings = {
    responsive: true, displaylogo: false,
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };
  const tint = (hex, alpha) =>
    `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
  const hue = (line) => (dark() ? line.dark : line.light);

  const SYMBOLS = { circle: "circle", ring: "circle-open", bar: "line-ns-open", cross: "x-thin-open", star: "star", dash: "line-ew-open" };

  function swatch(line) {
    const dash = { solid: "none", dot: "2 3", dash: "6 3" }[line.dash] ?? line.dash.replaceAll("px", "");
    const box = element("span");
    const shape = {
      points: line.symbol === "ring" ? '<circle class="ring" cx="13" cy="6" r="4" fill="none" stroke-width="1.5"/>'
        : line.symbol === "bar" ? '<path d="M13 1V11" stroke-width="2"/>' : '<circle cx="13" cy="6" r="4"/>',
      area: '<rect x="2" y="2" width="22" height="8"/>',
    }[line.mark] ?? `<path d="M0 6H26" fill="none" stroke-width="2.5" stroke-dasharray="${dash}"/>`;
    box.innerHTML = `<svg width="26" height="12" aria-hidden="true">${shape}</svg>`;
    const recolour = () => {
      for (const part of box.querySelectorAll("path, .ring")) part.setAttribute("stroke", hue(line));
      for (const part of box.querySelectorAll("circle:not(.ring), rect")) part.setAttribute("fill", hue(line));
    };
    recolour();
    drawn.push(recolour);
    return box.firstChild;
  }

  // One checkbox an optimizer; several lines may share a label.
  function legend(data, hidden, draw) {
    const boxes = [];
    const entries = [...new Map(data.lines.map((line) => [line.label, line])).values()];
    const items = entries.map((line) => {
      const box = element("input", { type: "checkbox", checked: !hidden.has(line.label) });
      const item = element("label", { class: box.checked ? "" : "off" }, box, swatch(line), element("span", {}, line.label));
      if (line.note) item.append(element("small", {}, line.note));
      const show = (on) => {
        box.checked = on;
        hidden[on ? "delete" : "add"](line.label);
        item.classList.toggle("off", !on);
      };
      box.addEventListener("change", () => { show(box.checked); draw(); });
      boxes.push(show);
      return item;
    });
    const all = (on) => () => { for (const show of boxes) show(on); draw(); };
    return element("div", { class: "legend", role: "group", "aria-label": "Show" }, ...items,
      ...(items.length > 2 ? [element("button", { type: "button", onclick: all(true) }, "all"),
        element("button", { type: "button", onclick: all(false) }, "none")] : []));
  }

  function choice(title, name, options, chosen, change) {
    return element("fieldset", {}, element("legend", {}, title), ...Object.entries(options).map(([value, text]) =>
      element("label", {}, element("input", {
        type: "radio", name, value, checked: value === chosen, onchange: () => change(value),
      }), text)));
  }
  // A link to a plot as it is shown: "#plot=bowl-curves&x=seconds&hide=Adam" has whatever differs from how it starts.
  const linked = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    return given.has("plot") ? given : null;
  };
  const linkedTo = (name) => (linked()?.get("plot") === name ? linked() : new URLSearchParams());

  function link(figure, state, start, hidden) {
    const made = new URLSearchParams({ plot: figure.dataset.plot });
    for (const [name, value] of Object.entries(state)) {
      if (JSON.stringify(value) !== JSON.stringify(start[name])) made.set(name, typeof value === "string" ? value : JSON.stringify(value));
    }
    for (const label of hidden) made.append("hide", label);
    return `#${made}`;
  }

  // Take over from a link what the plot knows; anything else in it is ignored.
  function follow(figure, state, hidden, allowed) {
    const given = linkedTo(figure.dataset.plot);
    for (const [name, fine] of Object.entries(allowed)) {
      if (!given.has(name)) continue;
      let value = given.get(name);
      try { value = JSON.parse(value); } catch { /* a word */ }
      if (fine(value)) state[name] = value;
    }
    for (const label of given.getAll("hide")) hidden.add(label);
  }

  function linkButton(reading, address) {
    const tell = (text) => { reading.textContent = text; };
    return element("button", {
      type: "button",
      onclick: async () => {
        history.replaceState(null, "", address());
        try {
          await navigator.clipboard.writeText(location.href);
          tell("The link to this view has been copied.");
        } catch { tell("The address of this page is now the link to this view."); }
      },
    }, "link");
  }

  const isFlag = (value) => typeof value === "boolean";
  const isRange = (value) => Array.isArray(value) && value.length === 2 && value.every(Number.isFinite);

  const tick = (text, on, change) =>
    element("label", {}, element("input", { type: "checkbox", checked: on, onchange: (e) => change(e.target.checked) }), text);

  // The point of a line that is nearest to x, unless the line ends before.
  function nearest(xs, x) {
    if (!xs.length || x > xs.at(-1) || x < xs[0]) return x === xs[0] ? 0 : null;
    return xs.reduce((best, each, i) => (Math.abs(each - x) < Math.abs(xs[best] - x) ? i : best), 0);
  }

  // Left and right arrows walk along the plot and say its values.
  function walkable(canvas, reading, at) {
    let place = null;
    const say = (step) => {
      const shown = at();
      const leader = shown.reduce((best, line) => (line.y.length > (best?.y.length ?? 0) ? line : best), null);
      if (!leader) return;
      const last = leader.y.length - 1;
      place = Math.min(last, Math.max(0, (place ?? (step < 0 ? last + 1 : -1)) + step));
      const x = leader.x[place];
      const points = shown.map((line) => ({ ...line, at: nearest(line.x, x) })).filter((line) => line.at !== null);
      Plotly.Fx.hover(canvas, points.map((line) => ({ curveNumber: line.trace, pointNumber: line.at })), ["xy"]);
      reading.textContent = `at ${short(x)}: ${points.map((line) => `${line.label} ${short(line.y[line.at])}`).join(", ")}`;
    };
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 };
      if (!(event.key in steps)) return;
      event.preventDefault();
      say(steps[event.key]);
    });
  }

  function stage(figure, data) {
    const canvas = element("div", {
      class: "canvas", tabindex: "0", role: "application",
      "aria-label": `${data.title}: arrow keys read the values`,
    });
    const reading = element("div", { class: "reading", role: "status", "aria-live": "polite" });
    return { canvas, reading };
  }

  // An axis of a plot: its scale, the part that is shown at first, its ticks and its direction.
  function scale(label, wanted, log, close, more) {
    const range = close && wanted.range && (!log || wanted.range[0] > 0)
      ? (log ? wanted.range.map(Math.log10) : [...wanted.range]) : null;
    const direction = wanted.reversed ? (range ? { range: range.toReversed() } : { autorange: "reversed" })
      : (range ? { range } : {});
    const ticks = wanted.ticks
      ? { tickmode: "array", tickvals: wanted.ticks.map(([at]) => at), ticktext: wanted.ticks.map(([, text]) => text) } : {};
    return axis(label, { type: log ? "log" : "linear", ...ticks, ...direction, ...more });
  }

  function plot(figure, data) {
    const start = {
      x: Object.keys(data.choices)[0], logX: data.x.log, logY: data.y.log, bands: true, close: true, zoomX: null, zoomY: null,
    };
    const state = { ...start };
    const hidden = new Set();
    follow(figure, state, hidden, {
      x: (value) => Object.hasOwn(data.choices, value), logX: isFlag, logY: isFlag, bands: isFlag, close: isFlag, zoomX: isRange, zoomY: isRange,
    });
    const { canvas, reading } = stage(figure, data);
    const along = (line) => line.x[state.x] ?? line.x[Object.keys(data.choices)[0]];
    const banded = data.lines.some((line) => line.low && line.mark !== "area");
    const pointed = data.lines.some((line) => line.names);
    // plain numbers would be too long
    const wide = (values) => (values.some((each) => each > 1e6 || (each > 0 && each < 1e-3)) ? "power" : "none");
    const format = {
      x: wide(data.x.range ?? data.lines.flatMap((line) => along(line))),
      y: wide(data.y.range ?? data.lines.flatMap((line) => line.y)),
    };
    const longest = Math.max(...data.lines.flatMap((line) => Object.values(line.x)[0]));
    let shown = [];

    function outline(line, x, strength) {
      return {
        x: [...x, ...x.toReversed()], y: [...line.high, ...line.low.toReversed()], fill: "toself", mode: "lines",
        line: { width: 0 }, fillcolor: tint(hue(line), strength), hoverinfo: "skip",
      };
    }

    function hover(line) {
      if (!line.names) return "%{y:.4g}%{customdata}";
      if (line.mark === "area") return "<b>%{text}</b>";
      return data.y.ticks ? "<b>%{text}</b><br>%{x:.4g}" : "<b>%{text}</b><br>%{y:.4g} at %{x:.4g}";
    }

    function traces() {
      const made = [];
      shown = [];
      for (const line of data.lines.filter((each) => !hidden.has(each.label) && each.y.length)) {
        const x = along(line);
        const area = line.mark === "area";
        if (area) made.push(outline(line, x, 0.5));
        else if (line.low && line.mark === "line" && state.bands) made.push(outline(line, x, 0.2));
        const y = area ? line.high : line.y;
        shown.push({ label: line.label, x, y, trace: made.length });
        const spread = line.low && !area ? y.map((each, i) => ` ± ${short(line.high[i] - each)}`) : y.map(() => "");
        const bars = line.low && !area && line.mark !== "line" && state.bands ? {
          error_y: {
            type: "data", symmetric: false, array: y.map((each, i) => line.high[i] - each),
            arrayminus: y.map((each, i) => each - line.low[i]), color: hue(line), thickness: 1.5, width: 0,
          },
        } : {};
        made.push({
          x, y, name: line.label, mode: { points: "markers", both: "lines+markers" }[line.mark] ?? "lines",
          customdata: spread, text: line.names ?? null, ...bars,
          line: { color: hue(line), width: line.label === "LODO" ? 3 : 2, dash: line.dash },
          marker: { color: hue(line), size: 1.8 * line.size, symbol: SYMBOLS[line.symbol], line: { color: hue(line), width: 1.5 } },
          hovertemplate: `${hover(line)}<extra>%{fullData.name}</extra>`,
        });
      }
      return made;
    }

    function draw() {
      const levels = Object.entries(data.levels);
      Plotly.react(canvas, traces(), layout({
        hovermode: shown.length > 14 || pointed || innerWidth < 640 ? "closest" : "x unified",
        uirevision: JSON.stringify({ ...state, zoomX: null, zoomY: null }),
        xaxis: scale(data.choices[state.x], data.x, state.logX, state.close, {
          hoverformat: ".5~g", exponentformat: format.x, ...(data.x.whole ? { dtick: Math.ceil(longest / 10) || 1 } : {}),
          ...(state.zoomX ? { range: state.zoomX } : {}),
        }),
        yaxis: scale(data.y.label, data.y, state.logY, state.close, {
          exponentformat: format.y, showspikes: false, ...(state.zoomY ? { range: state.zoomY } : {}),
        }),
        shapes: [...levels.map(([, y]) => ({
          type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("--ink"), width: 1.2, dash: "dot" },
        })), ...data.shades.map((shade) => ({
          type: "rect", xref: "paper", x0: 0, x1: 1, y0: shade.low, y1: shade.high, line: { width: 0 },
          fillcolor: tint(hue(shade), 0.18), layer: "below",
        }))],
        annotations: levels.map(([name, y]) => ({
          text: name, xref: "paper", x: 1, xanchor: "right", yanchor: "bottom", showarrow: false,
          y: state.logY ? Math.log10(y) : y, font: { size: 12 },
        })),
      }), settings);
    }

    const set = (name) => (value) => { Object.assign(state, { [name]: value, zoomX: null, zoomY: null }); draw(); };
    const titles = { step: "evaluations" in data.choices ? "update" : "step", evaluations: "step", seconds: "second" };
    const controls = element("div", { class: "controls" });
    if (Object.keys(data.choices).length > 1) {
      const options = Object.fromEntries(Object.keys(data.choices).map((name) => [name, titles[name] ?? name]));
      controls.append(choice("by", `x-${figure.dataset.plot}`, options, state.x, set("x")));
    }
    if (!data.x.ticks) controls.append(tick("log x", state.logX, set("logX")));
    if (!data.y.ticks) controls.append(tick("log y", state.logY, set("logY")));
    if (banded) controls.append(tick("spread", state.bands, set("bands")));
    if (data.x.range || data.y.range) controls.append(tick("close up", state.close, set("close")));
    controls.append(linkButton(reading, () => link(figure, state, start, hidden)));
    canvas.style.height = data.y.ticks ? `${Math.max(16, 6 + 1.5 * data.y.ticks.length)}rem` : "";
    figure.append(controls, legend(data, hidden, draw), canvas, reading);
    draw();
    drawn.push(draw);
    canvas.on("plotly_relayout", (change) => { // zoomed by hand
      for (const [axis, name] of [["xaxis", "zoomX"], ["yaxis", "zoomY"]]) {
        const range = change[`${axis}.range`] ?? [change[`${axis}.range[0]`], change[`${axis}.range[1]`]];
        if (range[0] !== undefined) state[name] = range.map((end) => +(+end).toPrecision(5));
        else if (change[`${axis}.autorange`]) state[name] = null;
      }
    });
    walkable(canvas, reading, () => shown);
  }

  // A matrix, red above zero and blue below; darkness may go with the logarithm of large values.
  function heat(figure, data) {
    const { canvas, reading } = stage(figure, data);
    const z = data.colors ?? data.values;
    const draw = () => Plotly.react(canvas, [{
      type: "heatmap", z, customdata: data.values, zmin: -data.largest, zmax: data.largest, showscale: false,
      colorscale: [[0, "#2166ac"], [0.5, colour("--paper")], [1, "#b2182b"]],
      hovertemplate: "row %{y}, column %{x}: %{customdata:.3g}<extra></extra>",
    }], layout({
      xaxis: axis(data.x, { showgrid: false, constrain: "domain" }),
      yaxis: axis("", { showgrid: false, autorange: "reversed", scaleanchor: "x", constrain: "domain" }),
    }), settings);
    figure.append(canvas, reading);
    draw();
    drawn.push(draw);
  }

  function contours(figure, data) {
    const start = { step: data.first };
    const state = { ...start };
    const hidden = new Set();
    follow(figure, state, hidden, { step: (value) => Number.isInteger(value) && value >= 0 && value <= data.steps });
    const { canvas, reading } = stage(figure, data);
    let shown = [];
    let playing = null;

    function draw() {
      const grey = dark() ? "#4a525c" : "#c4cad1";
      const made = [{
        type: "contour", ...data.contour, contours: { coloring: "none", ...data.levels },
        line: { color: grey, width: 1 }, showscale: false, hoverinfo: "skip",
      }];
      shown = [];
      for (const line of data.lines.filter((each) => !hidden.has(each.label))) {
        const upto = (values) => values.slice(0, state.step + 1);
        const loss = upto(line.loss);
        shown.push({ label: line.label, x: loss.map((_, i) => i), y: loss, trace: made.length });
        made.push({
          x: upto(line.x), y: upto(line.y), customdata: upto(line.loss), name: line.label, mode: "lines+markers",
          line: { color: hue(line), width: 1.5, dash: line.dash }, marker: { color: hue(line), size: 4 },
          hovertemplate: "step %{pointNumber}: (%{x:.4g}, %{y:.4g})<br>loss %{customdata:.4g}<extra>%{fullData.name}</extra>",
        });
      }
      const marked = Object.entries(data.marked);
      made.push({
        x: marked.map(([, [x]]) => x), y: marked.map(([, [, y]]) => y), text: marked.map(([name]) => name),
        mode: "markers+text", textposition: "top center", marker: { symbol: "star", size: 13, color: colour("--ink") },
        hoverinfo: "text",
      });
      Plotly.react(canvas, made, layout({
        hovermode: "closest", uirevision: "1",
        xaxis: axis("<i>x</i>", { showgrid: false, range: [data.contour.x[0], data.contour.x.at(-1)] }),
        yaxis: axis("<i>y</i>", { showgrid: false, range: [data.contour.y[0], data.contour.y.at(-1)] }),
      }), settings);
    }

    const number = element("output", {}, String(state.step));
    const slider = element("input", {
      type: "range", min: "0", max: String(data.steps), "aria-label": "Steps shown",
      oninput: (event) => move(+event.target.value),
    });
    slider.value = String(state.step);
    function move(step) {
      state.step = step;
      slider.value = String(step);
      number.textContent = String(step);
      draw();
    }
    const stop = () => { clearInterval(playing); playing = null; button.textContent = "play"; };
    const button = element("button", {
      type: "button",
      onclick: () => {
        if (playing) return stop();
        if (state.step >= data.steps) move(0);
        button.textContent = "stop";
        playing = setInterval(() => (state.step < data.steps ? move(state.step + 1) : stop()), 60);
        return undefined;
      },
    }, "play");
    figure.append(element("div", { class: "controls" }, element("label", {}, "step", slider), number, button,
      linkButton(reading, () => link(figure, state, start, hidden))),
      legend(data, hidden, draw), canvas, reading);
    draw();
    drawn.push(draw);
    walkable(canvas, reading, () => shown);
  }

  // Tables that are wider than the page say so.
  function startScrolling() {
    const watcher = new ResizeObserver((entries) => {
      for (const { target } of entries) {
        const region = target.closest(".scroll");
        region.toggleAttribute("data-wide", region.scrollWidth > region.clientWidth + 1);
      }
    });
    for (const region of document.querySelectorAll(".scroll")) {
      watcher.observe(region);
      watcher.observe(region.querySelector("table"));
    }
  }

  async function start() {
    startTheme();
    startScrolling();
    const figures = [...document.querySelectorAll("[data-plot]")];
    if (!figures.length) return;
    if (!("DecompressionStream" in window)) {
      const trouble = document.getElementById("trouble");
      trouble.textContent = "This browser is too old for the plots (it should be of 2023 or later); the rest works.";
      trouble.hidden = false;
      return;
    }
    const [plots, library] = await Promise.all([unpack("plots"), unpack("plotly")]);
    document.head.append(element("script", {}, library));
    const data = JSON.parse(plots);
    const draw = (figure) => ({ plot, contours, heat })[data[figure.dataset.plot].kind](figure, data[figure.dataset.plot]);
    const watcher = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        watcher.unobserve(target);
        draw(target);
      }
    }, { rootMargin: "600px" });
    for (const figure of figures) watcher.observe(figure);
    const wanted = figures.find((figure) => figure.dataset.plot === linked()?.get("plot"));
    if (wanted) {
      wanted.closest("details")?.setAttribute("open", "");
      wanted.scrollIntoView();
    }
    addEventListener("hashchange", () => { if (linked()) location.reload(); });
    root.dataset.ready = "true";
  }

  start();
})();
