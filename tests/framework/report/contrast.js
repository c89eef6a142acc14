// The smallest contrast of a visible text with its background, as defined by WCAG 2.1.
return (() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const parts = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = part => part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
  const luminance = colour => {
    const [red, green, blue] = parts(colour).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = element => {
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : colour;
  };
  const hasText = element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
  const texts = [...document.querySelectorAll("header *, main *")].filter(
    element => element.checkVisibility() && hasText(element) && !element.closest("svg"));
  return Math.min(...texts.map(element => {
    const [low, high] = [getComputedStyle(element).color, behind(element)].map(luminance).sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
  }));
})();
