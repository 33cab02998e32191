// The API key: kept in this module alone, gone with the page.

let key = "";
const listeners = [];
const input = document.getElementById("api-key");
const form = document.getElementById("access");

export const hasKey = () => key !== "";
export const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});
export const whenKeyChanges = (listener) => listeners.push(listener);

// The field is shown only on servers that ask for a key.
export function needsKey() {
  form.hidden = false;
  if (!key && document.activeElement === document.body) input.focus();
}

input.addEventListener("change", () => {
  key = input.value.trim();
  if (key) for (const listener of listeners) listener();
});
form.addEventListener("submit", (event) => event.preventDefault()); // Enter has changed the key
