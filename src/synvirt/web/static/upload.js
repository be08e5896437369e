// Sends a file to the API and shows how far it is; without this, the same form is sent by the browser itself.
"use strict";
(() => {
  const size = (count) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit += 1; }
    return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
  };
  const duration = (seconds) =>
    seconds < 60 ? `${Math.ceil(seconds)} s` : seconds < 3600 ? `${Math.ceil(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h ${Math.ceil((seconds % 3600) / 60)} min`;

  for (const form of document.querySelectorAll("form[data-upload]")) {
    const part = (name) => form.querySelector(`[data-${name}]`);
    const file = form.elements.namedItem("file");
    const asked = part("name").textContent;
    let request = null;
    form.classList.add("live");

    const showMistake = (detail, hint) => { part("mistake").textContent = [detail, hint].filter(Boolean).join(" → "); };
    const chosen = () => {
      part("name").textContent = file.files.length ? `${file.files[0].name}, ${size(file.files[0].size)}` : asked;
      form.classList.toggle("chosen", file.files.length > 0);
      showMistake("");
    };
    const sending = (now) => {
      part("sending").hidden = !now;
      part("stop").hidden = !now;
      form.querySelector("[type=submit]").hidden = now;
      form.classList.toggle("busy", now);
    };
    const ended = (detail, hint) => { request = null; sending(false); showMistake(detail, hint); };
    const asking = () => {
      const made = new XMLHttpRequest();
      made.addEventListener("error", () => ended("The connection broke. Nothing of the file was kept.", "send it again"));
      made.addEventListener("abort", () => ended("It was stopped. Nothing of the file was kept."));
      return made;
    };

    file.addEventListener("change", chosen);
    for (const name of ["dragenter", "dragover"])
      form.addEventListener(name, (event) => { event.preventDefault(); form.classList.add("over"); });
    for (const name of ["dragleave", "drop"])
      form.addEventListener(name, (event) => { event.preventDefault(); form.classList.remove("over"); });
    form.addEventListener("drop", (event) => {
      if (request || !event.dataTransfer.files.length) return;
      file.files = event.dataTransfer.files;
      chosen();
    });

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (request) return;
      const body = new FormData();
      const digest = form.elements.namedItem("sha256").value.trim();
      if (digest) body.append("sha256", digest);
      body.append("file", file.files[0]);
      const answered = () => {
        try { return JSON.parse(request.responseText); } catch { return {}; /* a proxy's page */ }
      };
      const refused = () => {
        const answer = answered();
        ended(answer.detail || `It was refused: ${request.status} ${request.statusText}.`, answer.hint);
      };
      const send = () => {
        const began = performance.now();
        request = asking();
        request.upload.addEventListener("progress", ({ loaded, total }) => {
          const seconds = Math.max((performance.now() - began) / 1000, 0.001);
          const done = loaded >= total;
          part("sending").querySelector("progress").value = (100 * loaded) / total;
          part("figures").textContent = done
            ? `${size(total)} sent; it is made durable`
            : `${size(loaded)} of ${size(total)} · ${size(loaded / seconds)}/s · ${duration(((total - loaded) * seconds) / loaded)} left`;
        });
        request.addEventListener("load", () => {
          if (request.status !== 201) return refused();
          window.removeEventListener("beforeunload", leaving);
          const { id } = answered();
          request = null;
          window.location.assign(form.dataset.then + encodeURIComponent(id));
        });
        request.open("POST", form.dataset.upload);
        request.send(body);
      };
      // A file that is too large is refused before a byte of it is sent.
      request = asking();
      request.addEventListener("load", () => {
        if (request.status !== 200) return refused();
        const { refused: why, hint } = answered();
        return why ? ended(why, hint) : send();
      });
      request.open("GET", `${form.dataset.limits}?size_bytes=${file.files[0].size}`);
      showMistake("");
      sending(true);
      part("figures").textContent = "";
      part("stop").focus();
      request.send();
    });
    part("stop").addEventListener("click", () => request && request.abort());
    const leaving = (event) => { if (request) event.preventDefault(); };
    window.addEventListener("beforeunload", leaving);
  }
})();
