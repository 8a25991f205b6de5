//! What pictures of attention weights are made of: colors, frames, labels.

use plotters::coord::Shift;
use plotters::drawing::DrawingAreaErrorKind;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(crate) type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

pub(crate) const LABEL_SIZE: i32 = 12;
pub(crate) const TITLE_SIZE: i32 = 14;
pub(crate) const INK: RGBColor = RGBColor(34, 34, 34);

/// Room for the longest of these labels: the width of a character of a sans-serif font is at most 0.62 of its size, on average over a
/// word.
pub(crate) fn room(labels: &[String], size: i32) -> i32 {
    let longest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    (longest as f64 * (0.62 * f64::from(size))).ceil() as i32 + 6
}

/// What the colors mean, drawn from a corner down.
pub(crate) fn scale(area: &Area<'_>, (left, top): (i32, i32), height: i32) -> Drawn {
    const STEPS: i32 = 100;
    const WIDTH: i32 = 20;
    label(area, (left, top - 18), "attention weight", TITLE_SIZE, INK, (HPos::Left, VPos::Center))?;
    let y_of = |share: f64| top + height - (share * f64::from(height)).round() as i32;
    for step in 0..STEPS {
        let [low, high] = [step, step + 1].map(|step| f64::from(step) / f64::from(STEPS));
        let color = color_of(weight_at((low + high) / 2.0));
        area.draw(&Rectangle::new([(left, y_of(high)), (left + WIDTH, y_of(low))], color.filled()))?;
    }
    frame(area, (left, top), (WIDTH, height), INK)?;
    for weight in [0.0f32, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0] {
        let y = y_of(share_of(weight));
        area.draw(&PathElement::new([(left + WIDTH, y), (left + WIDTH + 5, y)], INK))?;
        label(area, (left + WIDTH + 9, y), &weight.to_string(), LABEL_SIZE, INK, (HPos::Left, VPos::Center))?;
    }
    Ok(())
}

/// Place of a weight on the scale from 0 to 1. The square root, since most weights are small.
fn share_of(weight: f32) -> f64 {
    f64::from(weight).clamp(0.0, 1.0).sqrt()
}

fn weight_at(share: f64) -> f32 {
    (share * share) as f32
}

/// From white over blue to almost black.
pub(crate) fn color_of(weight: f32) -> RGBColor {
    const STOPS: [(u8, u8, u8); 6] =
        [(255, 255, 255), (207, 225, 242), (127, 184, 218), (53, 126, 185), (10, 74, 144), (6, 24, 58)];
    let at = share_of(weight) * (STOPS.len() - 1) as f64;
    let first = (at as usize).min(STOPS.len() - 2);
    let (a, b) = (STOPS[first], STOPS[first + 1]);
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * (at - first as f64)).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

pub(crate) fn frame(area: &Area<'_>, (x, y): (i32, i32), (width, height): (i32, i32), color: RGBColor) -> Drawn {
    area.draw(&Rectangle::new([(x, y), (x + width, y + height)], color.stroke_width(1)))?;
    Ok(())
}

/// A text style of so many pixels. plotters takes the height of a line, which it holds to be 1.24 of the font's size.
fn style(size: i32, color: RGBColor, (h, v): (HPos, VPos)) -> TextStyle<'static> {
    (FontFamily::SansSerif, f64::from(size) * 1.24).into_font().color(&color).pos(Pos::new(h, v))
}

pub(crate) fn label(
    area: &Area<'_>,
    at: (i32, i32),
    text: &str,
    size: i32,
    color: RGBColor,
    anchor: (HPos, VPos),
) -> Drawn {
    area.draw(&Text::new(text, at, style(size, color, anchor)))?;
    Ok(())
}

/// A label that reads from the bottom to the top.
pub(crate) fn label_upward(area: &Area<'_>, at: (i32, i32), text: &str, size: i32, color: RGBColor) -> Drawn {
    let style = style(size, color, (HPos::Left, VPos::Center)).transform(FontTransform::Rotate270);
    area.draw(&Text::new(text, at, style))?;
    Ok(())
}
