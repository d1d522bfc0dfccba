// SPDX-License-Identifier: Apache-2.0
// Keeps a page of the node as it is now, and adds what needs a script: a search, keys, a dark mode.
// What it puts into the page is HTML that the daemon has made of its templates, as for the page itself.
'use strict';

(() => {
  const SILENT = 25;  // seconds after which the stream counts as broken: it tells the time every 10
  const MODES = ['as the system', 'light', 'dark'];
  const UNITS = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);

  // ---- light and dark: at once, before anything is shown

  let mode = 0;
  try { mode = Math.max(MODES.indexOf(localStorage.getItem('mode')), 0); } catch { /* not allowed: not kept */ }

  function showMode() {
    if (mode) root.dataset.mode = MODES[mode]; else delete root.dataset.mode;
    const button = byId('mode');
    if (button) { button.hidden = false; button.textContent = `mode: ${MODES[mode]}`; }
  }

  function nextMode() {
    mode = (mode + 1) % MODES.length;
    try { localStorage.setItem('mode', MODES[mode]); } catch { /* as above */ }
    showMode();
  }

  // ---- times

  let ahead = 0;  // milliseconds by which the node's clock is ahead of this one
  let heard = 0;  // when the stream last said something, by this one

  function words(seconds) {
    for (const [unit, name] of UNITS) if (seconds >= unit) return `${(seconds / unit).toFixed(0)} ${name}`;
    return '0 s';
  }

  function set(element, text) { if (element.textContent !== text) element.textContent = text; }

  function showTimes(within = document) {
    const now = Date.now() + ahead;
    for (const each of within.querySelectorAll('time.age, time.ago')) {
      set(each, words((now - Date.parse(each.dateTime)) / 1000) + (each.className === 'ago' ? ' ago' : ''));
    }
  }

  function tick() {
    showTimes();
    if (!heard) return;
    set(byId('now'), `${new Date(Date.now() + ahead).toISOString().slice(0, 19).replace('T', ' ')} UTC`);
    const silent = (Date.now() - heard) / 1000;
    if (silent > SILENT) say(`not live: the node has said nothing for ${words(silent)}`, false);
  }

  function say(text, good) {
    const live = byId('live');
    set(live, text);
    live.className = good ? 'good' : 'bad';
  }

  // ---- the stream

  let stream = null;

  function unfollow() { stream?.close(); stream = null; }

  function follow() {
    const own = stream = new EventSource(document.body.dataset.live);
    const hear = (event) => {
      const told = JSON.parse(event.data);
      heard = Date.now();
      ahead = told.now * 1000 - heard;
      say('live', true);
      return told;
    };
    own.addEventListener('beat', hear);
    own.addEventListener('parts', (event) => put(hear(event)));
    own.onerror = () => {
      if (own.readyState !== EventSource.CLOSED) return say('not live: connecting again', false);
      say('not live: the node refuses more readers, or the token; loading again soon', false);
      setTimeout(() => location.reload(), 10000);
    };
  }

  // A browser has few connections to one address: a window that nobody sees leaves its own to others.
  function followWhileSeen() {
    if (document.hidden) { unfollow(); heard = 0; } else if (!stream) follow();
  }

  function put({ parts, gone, all }) {
    const rows = byId('pods');
    let more = false;
    for (const id of gone) remove(byId(id));
    if (rows && all.length) {  // the first frame of a connection: what else is here has gone meanwhile
      const present = new Set(all);
      for (const row of [...rows.rows]) if (!present.has(row.id)) row.remove();
    }
    for (const [id, html] of Object.entries(parts)) {
      const template = document.createElement('template');
      template.innerHTML = html;
      const fresh = template.content.firstElementChild;
      const old = byId(id);
      if (old) replace(old, fresh);
      else if (rows && fresh.tagName === 'TR') { rows.append(fresh); more = true; }
      showTimes(fresh);
    }
    if (more) sort(rows);
    if (rows) choose();
  }

  function remove(old) {  // other parts than rows keep their place: they may come back
    if (old?.tagName === 'TR') old.remove(); else old?.replaceChildren();
  }

  function replace(old, fresh) {
    const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute('href') : null;
    const at = [...old.querySelectorAll('pre')].map((each) =>
      each.scrollTop + each.clientHeight >= each.scrollHeight - 4 ? Infinity : each.scrollTop);
    fresh.hidden = old.hidden;
    old.replaceWith(fresh);
    if (focused) fresh.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    [...fresh.querySelectorAll('pre')].forEach((each, index) => { each.scrollTop = Math.min(at[index] ?? Infinity, each.scrollHeight); });
  }

  function sort(rows) {  // the newest first
    const sorted = [...rows.rows].sort((one, other) => other.dataset.at - one.dataset.at);
    sorted.forEach((row, index) => { if (rows.rows[index] !== row) rows.insertBefore(row, rows.rows[index]); });
  }

  // ---- the pods that are chosen

  const texts = new WeakMap();  // of rows, in lower case

  function text(row) {
    if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
    return texts.get(row);
  }

  function options(select, name, rows) {
    const values = [...new Set(rows.map((row) => row.dataset[name]))].sort();
    const chosen = select.value;
    if (chosen && !values.includes(chosen)) values.push(chosen);
    const present = [...select.options].slice(1).map((each) => each.value);
    if (present.join('\n') === values.join('\n')) return;
    select.replaceChildren(select.options[0], ...values.map((value) => new Option(value, value)));
    select.value = chosen;
  }

  function choose() {
    const rows = [...byId('pods').rows];
    const [namespace, state] = [byId('namespace'), byId('state')];
    options(namespace, 'namespace', rows);
    options(state, 'state', rows);
    const wanted = byId('search').value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const shown = (!namespace.value || row.dataset.namespace === namespace.value)
        && (!state.value || row.dataset.state === state.value)
        && wanted.every((word) => text(row).includes(word));
      if (row.hidden === shown) row.hidden = !shown;
      count += shown;
    }
    set(byId('chosen'), count === rows.length ? '' : `${count} of ${rows.length}`);
  }

  function keepChoice() {  // in the address, so that it can be kept as a bookmark and is there on the way back
    const query = new URLSearchParams();
    for (const id of ['search', 'namespace', 'state']) if (byId(id).value) query.set(id, byId(id).value);
    history.replaceState(null, '', `${location.pathname}${query.size ? `?${query}` : ''}${location.hash}`);
    try { sessionStorage.setItem('choice', location.search); } catch { /* as above */ }
  }

  function beginChoice() {
    const query = new URLSearchParams(location.search);
    for (const id of ['search', 'namespace', 'state']) {
      const value = query.get(id) ?? '';
      if (id !== 'search' && value) byId(id).add(new Option(value, value));
      byId(id).value = value;
      byId(id).addEventListener('input', () => { choose(); keepChoice(); });
    }
    byId('filter').hidden = false;
    byId('filter').addEventListener('submit', (event) => { event.preventDefault(); step(1); });
    choose();
    keepChoice();
    byId(location.hash.slice(1))?.querySelector('a')?.focus();
  }

  // ---- keys

  function step(by) {
    const links = [...document.querySelectorAll('#pods tr:not([hidden]) td:first-child a')];
    const row = document.activeElement.closest?.('#pods tr');
    const at = row ? links.findIndex((each) => row.contains(each)) : by > 0 ? -1 : links.length;
    links[Math.min(Math.max(at + by, 0), links.length - 1)]?.focus();
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const search = byId('search');
    const inSearch = event.target === search;
    const writes = inSearch || ['INPUT', 'SELECT', 'TEXTAREA'].includes(event.target.tagName);
    const steps = { ArrowDown: 1, ArrowUp: -1, ...(writes ? {} : { j: 1, k: -1 }) };
    if (event.key === 'Escape') escape(inSearch ? search : null);
    else if (search && event.key in steps && (inSearch || !writes)) step(steps[event.key]);
    else if (search && event.key === '/' && !writes) search.select();
    else if (event.key === 'd' && !writes) nextMode();
    else return;
    event.preventDefault();
  }

  function escape(search) {
    const up = byId('up');
    if (up) up.click();
    else if (search?.value) { search.value = ''; choose(); keepChoice(); }
    else document.activeElement.blur();
  }

  // ----

  function begin() {
    showMode();
    byId('mode').addEventListener('click', nextMode);
    byId('keys').hidden = false;
    root.classList.add('scripted');
    if (byId('pods')) beginChoice();
    const up = byId('up');
    try { if (up) up.search = sessionStorage.getItem('choice') ?? ''; } catch { /* as above */ }
    for (const each of document.querySelectorAll('pre')) each.scrollTop = each.scrollHeight;
    addEventListener('keydown', key);
    if (document.body.dataset.live) {
      followWhileSeen();
      document.addEventListener('visibilitychange', followWhileSeen);
      addEventListener('pagehide', unfollow);
      addEventListener('pageshow', followWhileSeen);
    }
    setInterval(tick, 1000);
  }

  showMode();
  document.addEventListener('DOMContentLoaded', begin);
})();
