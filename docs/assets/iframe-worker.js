// A page from the file system may not start a worker, which the search needs. Here the worker's script runs in a hidden
// frame instead. Pages from a server keep real workers.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      const script = frame.contentDocument.createElement("script");
      script.src = address;
      this.ready = new Promise((resolve) => { script.onload = resolve; });
      frame.contentDocument.body.append(script);
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    terminate() { this.inside.frameElement.remove(); }
  };
}
