// Search from pages that were opened from disk: browsers give file:// no workers, so the search runs in a hidden frame.
//
//   page   new Worker(url) ── postMessage ──▶ frame   importScripts, onmessage
//          onmessage      ◀── postMessage ──
//
// mkdocs.yml names it as the theme's "iframe-worker"; the theme would fetch its own from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.ready = new Promise(done => (this.done = done));
      addEventListener("message", event => event.source === frame.contentWindow && this.hear(event.data));
      const page = frame.contentWindow.document;
      page.open();
      page.write(`<script>
        postMessage = data => parent.postMessage(data, "*");
        importScripts = (...urls) => Promise.all(urls.map(url => new Promise(done => {
          const script = document.createElement("script");
          script.src = new URL(url, ${JSON.stringify(String(url))});
          script.onload = script.onerror = done;
          document.body.appendChild(script);
        })));
      </script><body><script src=${JSON.stringify(String(url))}></script><script>postMessage("iframe-worker is ready")</script>`);
      page.close();
      this.frame = frame;
    }
    hear(data) {
      if (data === "iframe-worker is ready") return this.done();
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.postMessage(data, "*"));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
