// Search from pages that were opened from disk: browsers give file:// no workers, so the search runs in a hidden frame.
//
//   page    new Worker(url)    worker.postMessage(data) ──▶ onmessage    frame: the worker's script
//           worker.onmessage ◀────────────────── postMessage(data)
//
// mkdocs.yml names it as the theme's "iframe-worker"; the theme would fetch its own from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = data => setTimeout(() => this.hear(data));
      const worker = new URL(url, document.baseURI);
      this.inside.importScripts = (...urls) => Promise.all(urls.map(other => this.load(new URL(other, worker))));
      this.loaded = this.load(worker);
    }
    load(url) {
      return new Promise(done => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = script.onerror = done;
        this.inside.document.body.appendChild(script);
      });
    }
    hear(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
