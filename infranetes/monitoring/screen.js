// SPDX-License-Identifier: Apache-2.0
// Shows the screen of a VM, by noVNC, which the node has from its Debian package.
import RFB from './novnc/core/rfb.js';

const screen = document.getElementById('screen');
const said = document.getElementById('status');
const keys = document.getElementById('keys');
const again = document.getElementById('again');

const socket = new URL(screen.dataset.socket, location.href);
socket.protocol = location.protocol === 'https:' ? 'wss:' : 'ws:';

const rfb = new RFB(screen, socket.href, { shared: true });
rfb.scaleViewport = true;
rfb.addEventListener('connect', () => { said.textContent = 'connected'; rfb.focus(); });
rfb.addEventListener('disconnect', (event) => {
    said.textContent = event.detail.clean ? 'the connection is closed' : 'the connection was lost or refused';
    keys.hidden = true;
    again.hidden = false;
});
keys.addEventListener('click', () => { rfb.sendCtrlAltDel(); rfb.focus(); });
again.addEventListener('click', () => location.reload());  // which has a new ticket
