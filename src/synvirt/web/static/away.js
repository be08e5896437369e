// While the service does not answer, moving figures on the page are old: a line says so. The stream and the polls go on asking by
// themselves, and the first answer takes the words away.
"use strict";
(() => {
  // The service sends a beat each 15 s, and a poll is asked again each 3 s.
  const SILENT_MS = 40000;
  // A stream that is cut and is there again at once is no news.
  const CUT_MS = 4000;
  const line = document.getElementById("away");
  let heardAt = Date.now();
  let failedAt = null;
  let listens = false;
  function heard() {
    heardAt = Date.now();
    failedAt = null;
    line.textContent = "";
  }
  function failed() {
    failedAt ??= Date.now();
  }
  function look() {
    const now = Date.now();
    if (line.textContent || !(failedAt === null ? listens && now - heardAt > SILENT_MS : now - failedAt >= CUT_MS)) return;
    const since = new Date(failedAt ?? heardAt).toISOString().slice(11, 19);
    line.textContent = `The service has not answered since ${since} UTC: what is shown here may be old. It goes on by itself once the service answers; if it does not, reload the page.`;
  }
  document.addEventListener("htmx:sseOpen", (event) => {
    listens = true;
    heard();
    event.detail.source.addEventListener("beat", heard);
  });
  document.addEventListener("htmx:sseError", failed);
  document.addEventListener("htmx:sseClose", () => {
    listens = false;
    heard();
  });
  document.addEventListener("htmx:sendError", failed);
  document.addEventListener("htmx:timeout", failed);
  document.addEventListener("htmx:responseError", (event) => {
    if (event.detail.xhr.status >= 500) failed();
  });
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) heard();
  });
  setInterval(look, 1000);
})();
