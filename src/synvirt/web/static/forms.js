// A form is sent once: what it begins would begin twice. Until the next page comes, its button says that it was sent.
"use strict";
document.addEventListener("submit", (event) => {
  const form = event.target;
  // A GET begins nothing. A form that a script sends (htmx, upload.js) is not sent by the browser too.
  if (form.method !== "post" || event.defaultPrevented) return;
  if (form.dataset.sent) return event.preventDefault();
  form.dataset.sent = "yes";
  if (event.submitter) event.submitter.setAttribute("aria-busy", "true");
});
// Going back shows the page as it was left, and its form may be sent again. So may one whose next page was stopped: by Escape,
// or by the browser's button, which only newer browsers tell (Navigation API).
function allowAgain() {
  for (const form of document.querySelectorAll("form[data-sent]")) {
    delete form.dataset.sent;
    for (const button of form.querySelectorAll("[aria-busy]")) button.removeAttribute("aria-busy");
  }
}
window.addEventListener("pageshow", allowAgain);
window.addEventListener("keydown", (event) => {
  if (event.key === "Escape") allowAgain();
});
if (window.navigation) window.navigation.addEventListener("navigateerror", allowAgain);
