// The API key, and what happens on which event.
function useKey(key) {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
  modelKnown = false;
  wake();
}

function openKey() {
  byId("key-input").value = "";
  byId("key-dialog").showModal();
}

byId("plan-form").addEventListener("submit", showPlan);
for (const input of document.querySelectorAll('input[name="plan-kind"]')) input.addEventListener("change", choosePlanKind);
byId("try-form").addEventListener("submit", tryPrompt);
byId("try-cancel").addEventListener("click", () => attempt?.abort());
byId("try-file").addEventListener("change", (event) => attach(event.target.files[0]));
byId("document-drop").addEventListener("click", detach);
byId("try-prompt").addEventListener("dragover", (event) => event.preventDefault());
byId("try-prompt").addEventListener("drop", (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files[0]);
});
byId("try").addEventListener("keydown", (event) => {
  if (event.key === "Escape") attempt?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("try-form").requestSubmit();
});
byId("key-open").addEventListener("click", openKey);
byId("notice-action").addEventListener("click", openKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-forget").addEventListener("click", () => {
  useKey("");
  byId("key-dialog").close();
});
byId("key-form").addEventListener("submit", () => useKey(byId("key-input").value.trim()));

follow();
