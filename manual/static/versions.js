/* SPDX-License-Identifier: Apache-2.0
   The list of versions, which is beside them; without it, or without scripts, there is this page's own. */
"use strict";
(async () => {
  const select = document.getElementById("versions");
  if (!select || location.protocol === "file:") return;
  const here = new URL(select.dataset.root || ".", location.href);
  const answer = await fetch(new URL("../versions.json", here));
  if (!answer.ok) return;
  for (const version of await answer.json())
    if (version !== select.dataset.version) select.add(new Option(version, version));
  select.addEventListener("change", async () => {
    const page = location.href.slice(here.href.length).split("#")[0];
    const there = new URL(`../${encodeURIComponent(select.value)}/`, here);
    const same = await fetch(new URL(page, there), { method: "HEAD" });
    location.href = same.ok ? new URL(page, there) : there;
  });
})();
