// Keeps a page of runs that go on up to date: asks the server that sent it for what is new, and shows that in its place.
"use strict";
(() => {
  const WAIT = 2000; // ms between two questions
  const SILENCE = 600; // seconds after which a run that goes on is looked at
  const said = document.getElementById("live");
  let stamp = said.dataset.stamp;
  let changed = Number(said.dataset.changed); // seconds since something was last written
  let state = said.dataset.state;
  let ended = said.dataset.ended === "true"; // all runs

  function say(words, lost = false) {
    said.textContent = words;
    said.classList.toggle("unfinished", lost);
  }

  // All that the page says of it: what a report has in its place is hidden.
  const sayState = () => say(`${state}, last written ${shown(changed)} ago`, !ended && changed > SILENCE);

  function shown(seconds) {
    return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
  }

  function replace(news) {
    const kept = window.report.chosen();
    const place = window.scrollY;
    const main = document.getElementById("main");
    main.style.minHeight = `${main.offsetHeight}px`;
    main.innerHTML = news.main;
    window.report.start(news.data, kept);
    window.scrollTo({ top: place, behavior: "instant" });
    setTimeout(() => (main.style.minHeight = ""), WAIT / 2);
  }

  async function ask() {
    try {
      const answer = await fetch(`/news?since=${encodeURIComponent(stamp)}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const news = await answer.json();
      changed = news.changed;
      if (news.main) {
        stamp = news.stamp;
        state = news.state;
        ended = news.ended;
        replace(news);
      }
      sayState();
    } catch {
      say("no answer from esper-watch", true);
    }
    setTimeout(ask, WAIT);
  }

  sayState();
  setTimeout(ask, WAIT);
})();
